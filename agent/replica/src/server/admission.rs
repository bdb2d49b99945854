//! Admission of engines.

use std::io::Write;
use std::os::unix::net::UnixStream;

use shorthorn_replica_core::{QueueId, Ready, RefusalReason, Superseded};
use shorthorn_types::{Errno, Generation};
use shorthorn_views::{Fence, Refused};
use shorthorn_wire::{Refusal, Welcome, encode_text};

use super::Server;
use crate::connection::EngineConnection;
use crate::handshake::refusal_frame;
use crate::mailbox::Candidate;

impl Server {
    /// Handles an engine that has proven its identity. A lower generation is refused. A higher one is stored
    /// first, and older connections are closed. The engine is admitted after the requests of these have
    /// ended: see [`Admission`](shorthorn_replica_core::Admission).
    pub(super) fn admit(&mut self, queue_id: QueueId, candidate: Candidate) {
        if self.stopping {
            return self.refuse(
                queue_id,
                candidate,
                Errno::SHUTDOWN,
                "the replica is being stopped".to_owned(),
            );
        }
        if self.executor.change(|state, _| state.asked_by(queue_id.generation)) {
            self.publish_failure();
        }
        if let Some(message) = self.failed() {
            return self.refuse(queue_id, candidate, Errno::IO, message);
        }
        let QueueId { generation, queue } = queue_id;
        if let Err(error) = self.executor.change(|state, disk| state.hello(disk, generation, queue)) {
            tracing::warn!(peer = candidate.peer, %error, "engine refused");
            return self.refuse(queue_id, candidate, error.errno(), error.to_string());
        }
        self.publish_views();
        let superseded = self.admission.arrive(queue_id, candidate);
        self.close_superseded(superseded, "a newer connection has come");
        self.welcome_ready();
    }

    /// Fences a node that does not answer. Once the generation is stored, an engine of a lower one gets no
    /// answer any more. That holds for its requests in flight and for another hello.
    pub(super) fn fence(&mut self, generation: Generation) {
        match self.executor.change(|state, disk| state.fence(disk, generation)) {
            Ok(Fence::Raised) => tracing::info!(%generation, "older engines are fenced"),
            Ok(Fence::Same) => return,
            Err(error) => return tracing::warn!(%generation, %error, "older engines could not be fenced"),
        }
        let superseded = self.admission.fence(generation);
        self.close_superseded(superseded, "older engines are fenced");
        self.publish_views();
    }

    fn close_superseded(&mut self, superseded: Superseded<u16, Candidate>, reason: &str) {
        for index in superseded.close {
            self.end(index, reason);
        }
        for (queue_id, candidate, why) in superseded.refuse {
            let (errno, message) = match why {
                RefusalReason::Fenced => (Errno::NOT_PERMITTED, self.fenced(queue_id).to_string()),
                RefusalReason::QueueAgain => {
                    (Errno::NOT_PERMITTED, "the queue has opened a newer connection".to_owned())
                }
                RefusalReason::TooMany => {
                    (Errno::new(libc::EAGAIN), "too many connections are waiting".to_owned())
                }
            };
            self.refuse(queue_id, candidate, errno, message);
        }
    }

    /// Returns the reason why no engine is admitted any more, if any.
    fn failed(&self) -> Option<String> {
        let failure = self.executor.state().failure()?;
        Some(format!("the replica has failed: {}", failure.outlook()))
    }

    fn fenced(&self, queue_id: QueueId) -> Refused {
        Refused::Fenced { asked: queue_id.generation, holder: self.executor.state().views().generation() }
    }

    /// Admits all candidates that no older connection blocks.
    pub(super) fn welcome_ready(&mut self) {
        let failed = self.failed();
        while let Some(free) = self.connections.free_index()
            && let Some(ready) = self.admission.next_ready(failed.is_some())
        {
            match ready {
                Ready::Welcome(queue_id, candidate) => self.welcome(free, queue_id, candidate),
                Ready::Refuse(queue_id, candidate) => {
                    self.refuse(queue_id, candidate, Errno::IO, failed.clone().unwrap_or_default());
                }
            }
        }
    }

    fn welcome(&mut self, index: u16, queue_id: QueueId, candidate: Candidate) {
        let Candidate { socket, hello, session, peer } = candidate;
        let welcome = Welcome {
            run: self.run,
            size_bytes: self.executor.size_bytes(),
            report: self.executor.state().views().report().clone(),
            lost_cache: self.executor.state().intent_log().has_lost_cache(),
            rebuilding: self.executor.is_rebuilding(),
            tracks: self.executor.state().intent_log().tracks(),
            stamp: self.executor.state().intent_log().stamp(),
        };
        let (header, text) = encode_text(hello.response(Ok(())), &session.prove_welcome(&welcome));
        tracing::info!(generation = %queue_id.generation, queue = queue_id.queue, peer, "connection opened");
        let mut connection = EngineConnection::new(socket, session, peer, index);
        // The stream is empty: it has room for one frame.
        let sent = connection.send_welcome(&header, text);
        connection.arm(&mut self.ring);
        self.connections.put(index, connection);
        self.admission.open(index, queue_id);
        if let Err(error) = sent {
            self.end(index, error);
        }
    }

    /// Answers the hello with a refusal. The socket is new and its buffer empty, so the refusal fits, and the
    /// call does not wait. Otherwise the engine sees only the end of the connection.
    pub(super) fn refuse(&self, queue_id: QueueId, candidate: Candidate, errno: Errno, message: String) {
        let generation = self.executor.state().views().generation();
        let holder = (queue_id.generation < generation).then(|| candidate.session.prove_holder(generation));
        let frame = refusal_frame(&candidate.hello, errno, &Refusal { message, holder });
        let mut socket = UnixStream::from(candidate.socket);
        let written = socket.set_nonblocking(true).and_then(|()| socket.write_all(&frame));
        if let Err(error) = written {
            tracing::debug!(peer = candidate.peer, %error, "the refusal could not be sent");
        }
    }

    /// Publishes the engine that holds the replica, and the known views.
    pub(super) fn publish_views(&self) {
        self.status.views(self.executor.state().views());
    }
}
