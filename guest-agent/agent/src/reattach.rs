//! RESET, STATE, RESUME: a new peer finds its place.

use crate::guest::is_guests;
use crate::json::Object;
use crate::session::{Event, Session};
use crate::stream::Stream;
use cloche_protocol::limits::NONCE_BYTES;
use cloche_protocol::{Frame, Kind};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Deserialize)]
struct Resume {
    #[serde(default)]
    streams: BTreeMap<u32, Position>,
    #[serde(default)]
    close: BTreeSet<u32>,
}

#[derive(Deserialize)]
struct Position {
    logged: u64,
}

impl Session {
    /// The frame being written is finished, whole queued frames are dropped (their data is kept by offset).
    pub(crate) fn on_reset(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let Ok(nonce) = <[u8; NONCE_BYTES]>::try_from(frame.payload) else { return };
        self.silent = Some(nonce);
        self.drop_guests(events);
        self.out.drop_unwritten();
        let state = self.state();
        self.out.push_with(Kind::State, 0, |payload| {
            payload.extend_from_slice(&nonce);
            payload.extend_from_slice(state.as_bytes());
        });
    }

    fn state(&self) -> String {
        let mut streams = Object::new();
        // The guest's own streams are gone by now.
        for (id, stream) in &self.streams {
            streams.raw_in_place(&id.to_string(), &entry(stream));
        }
        Object::new()
            .raw("streams", &streams.finish())
            .number("highest_host", self.highest_host)
            .number("highest_guest", self.guest.highest)
            .raw("hello", &self.hello)
            .finish()
    }

    pub(crate) fn on_resume(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let Some((nonce, json)) = frame.payload.split_first_chunk::<NONCE_BYTES>() else { return };
        if self.silent != Some(*nonce) || crate::wire::check_depth(json).is_err() {
            return;
        }
        let Ok(resume) = serde_json::from_slice::<Resume>(json) else { return };
        let sane = resume.streams.iter().all(|(id, position)| match self.streams.get(id) {
            Some(s) if !is_guests(*id) => {
                s.send.bytes.start() <= position.logged && position.logged <= s.send.sent
            }
            _ => false,
        });
        if !sane {
            return;
        }
        self.silent = None;
        // Streams that the guest opened since RESET are for this host.
        let ids: Vec<u32> = self.streams.keys().copied().filter(|id| !is_guests(*id)).collect();
        for id in ids {
            match resume.streams.get(&id).filter(|_| !resume.close.contains(&id)) {
                Some(position) => self.rewind(id, position.logged),
                None => self.close(id, events),
            }
        }
        events.extend(self.streams.keys().map(|id| Event::Room(*id)));
    }

    fn rewind(&mut self, id: u32, logged: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let before = stream.send.bytes.len();
        stream.send.bytes.release(logged, &mut self.pool);
        self.held -= before - stream.send.bytes.len();
        stream.send.sent = logged;
        stream.send.eof_sent = false;
        // STATE said that it is open; the host does not need OPENED again.
        stream.opened_sent = stream.opened.is_some();
        stream.end_sent = false;
        stream.receive.tell_again = true;
        self.ready.insert(id);
    }

    fn close(&mut self, id: u32, events: &mut Vec<Event>) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.parent.is_some() {
            // Only its command can end it; the command must not block on a full pipe meanwhile.
            stream.send.discard = true;
            let held = stream.send.bytes.len();
            stream.send.bytes.recycle(&mut self.pool);
            self.held -= held;
            return;
        }
        self.remove(id);
        events.push(Event::Close(id));
    }
}

fn entry(stream: &Stream) -> String {
    let mut object = Object::new().text("op", stream.op.as_bytes());
    if let Some(command) = &stream.command {
        object = object.text("command", command.as_bytes());
    }
    let flags = [
        ("opened", stream.opened.is_some()),
        ("eof_sent", stream.send.eof_sent),
        ("eof_received", stream.receive.eof),
        ("ended", stream.end.is_some()),
    ];
    let numbers = [
        ("sent", stream.send.sent),
        ("acked", stream.send.bytes.start()),
        ("received", stream.receive.received()),
    ];
    for (key, value) in numbers {
        object = object.number(key, value);
    }
    for (key, value) in flags {
        object = object.flag(key, value);
    }
    object.finish()
}
