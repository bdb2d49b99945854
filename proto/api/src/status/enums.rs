//! The words of volumes, engines, replicas, devices and certificates as enums of the .proto files.

use shorthorn_types::status::{
    CheckOutcome, CurrentState, DataLocality, DesireState, DeviceState, Frontend, Robustness, RollOverPhase,
    UnknownFrontend, VolumeState,
};

use crate::v1;

/// The word for a number of a later version without a word.
const UNKNOWN: &str = "unknown";

/// Converts a type to its enum and back.
macro_rules! converts {
    ($($kind:ident { $($variant:ident),* })*) => {$(
        impl From<$kind> for v1::$kind {
            fn from(value: $kind) -> v1::$kind {
                match value {
                    $($kind::$variant => v1::$kind::$variant,)*
                }
            }
        }

        impl v1::$kind {
            fn known(number: i32, word: &str) -> Option<$kind> {
                match v1::$kind::try_from(number) {
                    $(Ok(v1::$kind::$variant) => Some($kind::$variant),)*
                    Ok(v1::$kind::Unspecified) => $kind::of_word(word),
                    Err(_) => None,
                }
            }
        }
    )*};
}

converts! {
    VolumeState { Creating, Attached, Detached, Attaching, Detaching, Deleting }
    Robustness { Healthy, Degraded, Faulted, Unknown }
    Frontend { Auto, Ublk, Nbd, Iscsi, Socket, Unknown }
    DataLocality { Disabled, BestEffort }
    DesireState { Running, Stopped }
    CurrentState { Stopped, Starting, Running, Stopping, Error, Unknown }
    CheckOutcome { Passed, Warned, Failed }
    RollOverPhase { Idle, Distributing, Reissuing }
    DeviceState { Live, Recovering, Stale }
}

/// Gives messages with such a field their typed accessors.
macro_rules! has_words {
    ($($message:ident {
        $($field:ident, $word:ident: $kind:ident, $known:ident, $shown:ident, $with:ident;)*
    })*) => {
        $(impl v1::$message {
            $(
                /// Returns the value; none if the message has none, or one of a later version.
                #[must_use]
                pub fn $known(&self) -> Option<$kind> {
                    v1::$kind::known(self.$field, &self.$word)
                }

                /// Returns the word to show, even of a later version; empty if the message has none.
                #[must_use]
                pub fn $shown(&self) -> &str {
                    match self.$known() {
                        Some(value) => value.as_str(),
                        None if self.$word.is_empty() && self.$field != 0 => UNKNOWN,
                        None => &self.$word,
                    }
                }

                /// Returns the message with that value; without one if it is none.
                #[must_use]
                pub fn $with(mut self, value: impl Into<Option<$kind>>) -> Self {
                    let value = value.into();
                    self.$field = value.map_or(v1::$kind::Unspecified, v1::$kind::from).into();
                    self.$word = value.map($kind::as_str).unwrap_or_default().to_owned();
                    self
                }
            )*
        })*
    };
}

has_words! {
    Volume {
        state, state_word: VolumeState, known_state, shown_state, with_state;
        robustness, robustness_word: Robustness, known_robustness, shown_robustness, with_robustness;
        frontend, frontend_word: Frontend, known_frontend, shown_frontend, with_frontend;
        data_locality, data_locality_word: DataLocality,
            known_data_locality, shown_data_locality, with_data_locality;
    }
    EngineStatus {
        frontend, frontend_word: Frontend, known_frontend, shown_frontend, with_frontend;
    }
    FrontendInfo {
        frontend, frontend_word: Frontend, known_frontend, shown_frontend, with_frontend;
    }
    StartEngineRequest {
        frontend, frontend_word: Frontend, known_frontend, shown_frontend, with_frontend;
    }
    CreateVolumeRequest {
        frontend, frontend_word: Frontend, known_frontend, shown_frontend, with_frontend;
    }
    Engine {
        frontend, frontend_word: Frontend, known_frontend, shown_frontend, with_frontend;
        desire_state, desire_state_word: DesireState,
            known_desire_state, shown_desire_state, with_desire_state;
        current_state, current_state_word: CurrentState,
            known_current_state, shown_current_state, with_current_state;
    }
    Replica {
        desire_state, desire_state_word: DesireState,
            known_desire_state, shown_desire_state, with_desire_state;
        current_state, current_state_word: CurrentState,
            known_current_state, shown_current_state, with_current_state;
    }
    Check {
        outcome, outcome_word: CheckOutcome, known_outcome, shown_outcome, with_outcome;
    }
    CheckFinding {
        outcome, outcome_word: CheckOutcome, known_outcome, shown_outcome, with_outcome;
    }
    TlsState {
        phase, phase_word: RollOverPhase, known_phase, shown_phase, with_phase;
    }
    Device {
        state, state_word: DeviceState, known_state, shown_state, with_state;
    }
}

/// Gives requests with a choice of the frontend their typed accessor.
macro_rules! chooses_frontend {
    ($($request:ident),*) => {$(
        impl v1::$request {
            /// Returns the chosen frontend; `auto` if the request names none.
            ///
            /// # Errors
            /// The frontend is unknown, such as one of a later version.
            pub fn chosen_frontend(&self) -> Result<Frontend, UnknownFrontend> {
                match (self.known_frontend(), self.shown_frontend()) {
                    (Some(frontend), _) => frontend.chosen(),
                    (None, "") => Ok(Frontend::Auto),
                    (None, word) => word.parse(),
                }
            }
        }
    )*};
}
chooses_frontend!(StartEngineRequest, CreateVolumeRequest);

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// The words of a volume of controller.proto as release 0.1.0 has them.
    #[derive(Clone, PartialEq, Message)]
    struct FirstVolume {
        #[prost(string, tag = "4")]
        frontend: String,
        #[prost(string, tag = "6")]
        state: String,
        #[prost(string, tag = "7")]
        robustness: String,
        #[prost(string, tag = "25")]
        data_locality: String,
    }

    /// A replica of release 0.1.0. The engine has these words in fields 2 and 3.
    #[derive(Clone, PartialEq, Message)]
    struct FirstReplica {
        #[prost(string, tag = "6")]
        desire_state: String,
        #[prost(string, tag = "7")]
        current_state: String,
    }

    /// The frontend of release 0.1.0: field 5 of a request to start an engine.
    #[derive(Clone, PartialEq, Message)]
    struct FirstStart {
        #[prost(string, tag = "5")]
        frontend: String,
    }

    /// The frontend of release 0.1.0: field 6 of the status of an engine and of the engine of a volume.
    #[derive(Clone, PartialEq, Message)]
    struct FirstEngine {
        #[prost(string, tag = "6")]
        frontend: String,
    }

    /// A device of release 0.1.0.
    #[derive(Clone, PartialEq, Message)]
    struct FirstDevice {
        #[prost(string, tag = "7")]
        state: String,
    }

    fn sent<T: Message + Default>(message: &impl Message) -> T {
        T::decode(message.encode_to_vec().as_slice()).unwrap()
    }

    fn volume() -> v1::Volume {
        v1::Volume::default()
            .with_state(VolumeState::Attached)
            .with_robustness(Robustness::Degraded)
            .with_frontend(Frontend::Nbd)
            .with_data_locality(DataLocality::BestEffort)
    }

    fn first() -> FirstVolume {
        FirstVolume {
            frontend: "nbd".to_owned(),
            state: "attached".to_owned(),
            robustness: "degraded".to_owned(),
            data_locality: "best-effort".to_owned(),
        }
    }

    fn check_known(read: &v1::Volume) {
        assert_eq!(read.known_state(), Some(VolumeState::Attached));
        assert_eq!(read.known_robustness(), Some(Robustness::Degraded));
        assert_eq!(read.known_frontend(), Some(Frontend::Nbd));
        assert_eq!(read.known_data_locality(), Some(DataLocality::BestEffort));
    }

    #[test]
    fn words_and_numbers_read_back_in_both_releases() {
        check_known(&sent(&volume()));
        assert_eq!(sent::<FirstVolume>(&volume()), first());
        check_known(&sent(&first()));
        let replica = v1::Replica::default().with_desire_state(DesireState::Running);
        let replica = replica.with_current_state(CurrentState::Error);
        let old: FirstReplica = sent(&replica);
        assert_eq!((old.desire_state.as_str(), old.current_state.as_str()), ("running", "error"));
        let read: v1::Replica = sent(&old);
        assert_eq!(read.known_desire_state(), Some(DesireState::Running));
        assert_eq!(read.known_current_state(), Some(CurrentState::Error));
    }

    #[test]
    fn states_of_devices_read_back_in_both_releases() {
        for (state, word) in DeviceState::ALL.into_iter().zip(["live", "recovering", "stale"]) {
            let device = v1::Device::default().with_state(state);
            assert_eq!(sent::<v1::Device>(&device).known_state(), Some(state));
            let old: FirstDevice = sent(&device);
            assert_eq!(old.state, word);
            let read: v1::Device = sent(&old);
            assert_eq!((read.known_state(), read.shown_state()), (Some(state), word));
        }
        assert_eq!(v1::Device::default().known_state(), None);
    }

    #[test]
    fn frontends_read_back_in_both_releases() {
        let start = v1::StartEngineRequest::default().with_frontend(Frontend::Iscsi);
        let old: FirstStart = sent(&start);
        assert_eq!(old.frontend, "iscsi");
        assert_eq!(sent::<v1::StartEngineRequest>(&old).chosen_frontend(), Ok(Frontend::Iscsi));
        let old: FirstEngine = sent(&v1::EngineStatus::default().with_frontend(Frontend::Socket));
        assert_eq!(old.frontend, "socket");
        assert_eq!(sent::<v1::EngineStatus>(&old).known_frontend(), Some(Frontend::Socket));
        assert_eq!(sent::<v1::Engine>(&old).known_frontend(), Some(Frontend::Socket));
        let none = v1::EngineStatus::default().with_frontend(None);
        assert_eq!((none.known_frontend(), none.shown_frontend()), (None, ""));
    }

    #[test]
    fn a_frontend_of_a_later_version_is_refused_and_no_frontend_is_auto() {
        let chosen = |frontend, word: &str| {
            let frontend_word = word.to_owned();
            v1::StartEngineRequest { frontend, frontend_word, ..Default::default() }.chosen_frontend()
        };
        assert_eq!((chosen(0, ""), chosen(0, "nbd")), (Ok(Frontend::Auto), Ok(Frontend::Nbd)));
        assert_eq!(chosen(v1::Frontend::Ublk.into(), ""), Ok(Frontend::Ublk));
        let refused = [chosen(0, "nvmf"), chosen(99, "nvmf"), chosen(99, ""), chosen(0, "unknown")];
        assert!(refused.iter().all(Result::is_err), "{refused:?}");
        assert!(refused[1].as_ref().unwrap_err().to_string().contains("nvmf"));
    }

    #[test]
    fn a_value_of_a_later_version_is_shown_as_it_was_sent() {
        let later = v1::Volume { state: 99, state_word: "levitating".to_owned(), ..volume() };
        assert_eq!((later.known_state(), later.shown_state()), (None, "levitating"));
        let only_word = v1::Volume { state: 0, ..later.clone() };
        assert_eq!((only_word.known_state(), only_word.shown_state()), (None, "levitating"));
        let only_number = v1::Volume { state_word: String::new(), ..later };
        assert_eq!((only_number.known_state(), only_number.shown_state()), (None, "unknown"));
        let known = v1::Volume { state_word: String::new(), ..volume() };
        assert_eq!(known.shown_state(), "attached", "a later version may leave the words out");
        assert_eq!(v1::Volume::default().shown_state(), "");
    }
}
