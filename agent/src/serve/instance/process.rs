/// How far the process of an instance is, as whoever runs it sees that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There is none, and none is to be.
    Stopped,
    /// It is being started.
    Starting,
    /// It runs.
    Running,
    /// It was told to stop.
    Stopping,
    /// It ended, or cannot be started; it is tried again where that can help.
    Failed,
}

/// The process of an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// How far it is.
    pub phase: Phase,
    /// Its id, while it lives.
    pub pid: Option<i32>,
    /// Why it failed; empty else.
    pub message: String,
}

impl Process {
    /// In `phase`, with no id and no message.
    pub fn only(phase: Phase) -> Process {
        Process { phase, pid: None, message: String::new() }
    }

    /// In `phase` as process `pid`.
    pub fn with_pid(phase: Phase, pid: i32) -> Process {
        Process { phase, pid: Some(pid), message: String::new() }
    }

    /// Failed.
    pub fn failed(message: impl Into<String>) -> Process {
        Process { phase: Phase::Failed, pid: None, message: message.into() }
    }
}
