//! What a session sends next, and whether that can wait.

use crate::guest::is_guests;
use crate::session::Session;
use cloche_protocol::Kind;

/// Sent in one write: throughput goes with the bytes of a write, not with the size of a frame.
pub const FLUSH_BYTES: usize = 524_288;

impl Session {
    /// Appends frames until there is a write's worth or nothing is left.
    pub fn fill(&mut self) {
        if self.silent.is_some() {
            return;
        }
        self.send_opens();
        while self.out.pending().len() < FLUSH_BYTES {
            let next =
                self.ready.range(self.cursor.saturating_add(1)..).next().or(self.ready.first()).copied();
            let Some(id) = next else { return };
            self.cursor = id;
            if !self.emit(id) {
                self.ready.remove(&id);
            }
        }
    }

    /// Nothing waits to be said but what this stream has.
    pub fn has_only(&self, id: u32) -> bool {
        self.silent.is_none() && self.out.is_empty() && self.ready.iter().all(|ready| *ready == id)
    }

    pub fn has_more(&self) -> bool {
        self.silent.is_none() && !self.ready.is_empty()
    }

    fn emit(&mut self, id: u32) -> bool {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.over) else { return false };
        if let (Some(opened), false) = (&stream.opened, stream.opened_sent) {
            self.out.push(Kind::Opened, id, opened);
            stream.opened_sent = true;
        }
        if stream.opened.is_some() && stream.parent.is_none() {
            stream.receive.emit(id, &mut self.out);
        }
        let more = stream.send.emit(id, &mut self.out);
        if is_guests(id) {
            let before = stream.send.bytes.len();
            stream.send.bytes.release(stream.send.sent, &mut self.pool);
            self.held -= before - stream.send.bytes.len();
        }
        if more {
            return true;
        }
        if let (Some(parent), true) = (stream.parent, stream.send.eof_sent) {
            self.ready.insert(parent);
        }
        self.emit_end(id);
        false
    }

    fn emit_end(&mut self, id: u32) {
        let Some(stream) = self.streams.get(&id) else { return };
        let stderr_done = stream.stderr.and_then(|s| self.streams.get(&s)).is_none_or(|s| s.send.is_done());
        if stream.end_sent || !stream.send.is_done() || !stderr_done {
            return;
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if let Some(end) = &stream.end {
            self.out.push(Kind::End, id, end);
            stream.end_sent = true;
        }
    }
}
