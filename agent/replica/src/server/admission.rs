//! Which engine is let in, and when.

use std::io::Write;
use std::os::unix::net::UnixStream;

use shorthorn_control::Status;
use shorthorn_types::{Errno, Generation};
use shorthorn_views::{Fence, Refused};
use shorthorn_wire::{Refusal, Welcome, encode_text};

use super::Server;
use crate::candidates::Place;
use crate::connection::Connection;
use crate::error::ReplicaError;
use crate::handshake::refusal_frame;
use crate::mailbox::Candidate;

impl Server {
    /// An engine has proven who it is. A lower generation is refused. A higher one is stored, all older
    /// connections are closed, and it is welcome when what they have sent has ended. For one more connection
    /// of the same engine, an older one for the same queue is closed.
    pub(super) fn admit(&mut self, candidate: Candidate) {
        if self.stopping {
            return self.refuse(candidate, Errno::SHUTDOWN, "the replica is being stopped".to_owned());
        }
        if let Some(message) = self.failed() {
            return self.refuse(candidate, Errno::IO, message);
        }
        let place = candidate.place;
        match self.state.change(&mut self.executor, |views| views.fence(place.generation)) {
            Ok(Fence::Raised) => {
                self.end_connections("a newer engine has come", |other| other.generation < place.generation)
            }
            Ok(Fence::Same) => self.end_connections("its queue has a newer one", |other| other == place),
            Err(error) => {
                tracing::warn!(peer = candidate.peer, %error, "engine refused");
                return self.refuse(candidate, error.errno(), error.to_string());
            }
        }
        self.publish_views();
        let mut displaced = Vec::new();
        let pushed = self.candidates.push(place, candidate, &mut displaced);
        for older in displaced {
            let message = ReplicaError::from(self.fenced(older.place)).to_string();
            self.refuse(older, Errno::NOT_PERMITTED, message);
        }
        match pushed {
            Ok(()) => self.welcome_ready(),
            Err(candidate) => {
                self.refuse(
                    candidate,
                    Errno::new(libc::EAGAIN),
                    "too many connections are waiting".to_owned(),
                );
            }
        }
    }

    /// The volume is taken off a node that does not answer. An engine of a lower generation gets no answer any more
    /// once that is stored: neither to what it has in flight, nor to another hello.
    pub(super) fn fence(&mut self, generation: Generation) {
        match self.state.change(&mut self.executor, |views| views.fence(generation)) {
            Ok(Fence::Raised) => tracing::info!(%generation, "older engines are fenced"),
            Ok(Fence::Same) => return,
            Err(error) => return tracing::warn!(%generation, %error, "older engines could not be fenced"),
        }
        self.end_connections("older engines are fenced", |other| other.generation < generation);
        for older in self.candidates.displace(generation) {
            let message = ReplicaError::from(self.fenced(older.place)).to_string();
            self.refuse(older, Errno::NOT_PERMITTED, message);
        }
        self.publish_views();
    }

    /// Why nobody is let in any more, if that is so.
    fn failed(&self) -> Option<String> {
        self.executor.failure().map(|failure| format!("the replica has failed: {failure}"))
    }

    fn fenced(&self, place: Place) -> Refused {
        Refused::Fenced { asked: place.generation, holder: self.state.views().generation() }
    }

    fn end_connections(&mut self, why: &str, which: impl Fn(Place) -> bool) {
        for index in self.connection_indices() {
            if self.connection(index).is_some_and(|connection| which(connection.place)) {
                self.end(index, why);
            }
        }
    }

    /// Lets in everybody whom no older connection stands in the way of.
    pub(super) fn welcome_ready(&mut self) {
        while let Some(free) = self.connections.iter().position(Option::is_none) {
            let connected = self.connections.iter().flatten().map(|connection| connection.place);
            let Some((place, candidate)) = self.candidates.next_ready(connected) else { return };
            match self.failed() {
                // What it has waited for may be what has failed.
                Some(message) => self.refuse(candidate, Errno::IO, message),
                None => self.welcome(free, place, candidate),
            }
        }
    }

    fn welcome(&mut self, index: usize, place: Place, candidate: Candidate) {
        let Candidate { socket, hello, peer, .. } = candidate;
        let welcome = Welcome {
            size_bytes: self.executor.size_bytes(),
            report: self.state.views().report().clone(),
            lost_cache: self.executor.keeper().has_lost_cache(),
            rebuilding: self.executor.is_rebuilding(),
            tracks: self.executor.tracks(),
            stamp: self.executor.keeper().stamp(),
        };
        let (header, text) = encode_text(hello.response(Ok(())), &welcome);
        tracing::info!(generation = %place.generation, queue = place.queue, peer, "connection opened");
        let number = u16::try_from(index).unwrap_or(u16::MAX);
        let mut connection = Connection::new(socket, place, peer, number);
        // The stream is empty: it has room for one frame.
        let sent = connection.stream.send_owned(&header.encode(), text);
        connection.stream.arm(&mut self.ring);
        self.connections[index] = Some(connection);
        if let Err(error) = sent {
            self.end(number, error);
        }
    }

    /// Answers the hello with a refusal. The socket is new and its buffer empty, so the refusal fits, and
    /// nothing is waited for; where it does not, the engine sees the end of the connection alone.
    pub(super) fn refuse(&self, candidate: Candidate, errno: Errno, message: String) {
        let generation = self.state.views().generation();
        let holder = (candidate.place.generation < generation).then_some(generation);
        let frame = refusal_frame(&candidate.hello, errno, &Refusal { message, holder });
        let mut socket = UnixStream::from(candidate.socket);
        let written = socket.set_nonblocking(true).and_then(|()| socket.write_all(&frame));
        if let Err(error) = written {
            tracing::debug!(peer = candidate.peer, %error, "the refusal could not be sent");
        }
    }

    /// Tells which engine holds the replica, and the views that it knows.
    pub(super) fn publish_views(&self) {
        let views = self.state.views();
        self.publisher.update(|status| {
            if let Status::Replica(replica) = status {
                replica.generation = views.generation();
                replica.views = Some(views.report().clone());
            }
        });
    }
}
