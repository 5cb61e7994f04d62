//! One stream: what it may send, what it has received, how far its life is.

use crate::buffer::{Bytes, Pool};
use crate::guest::is_guests;
use crate::outbox::Outbox;
use cloche_protocol::limits::{PAYLOAD_BYTES_MAX, WINDOW_BYTES_START};
use cloche_protocol::Kind;

pub struct Stream {
    pub op: Box<str>,
    pub command: Option<Box<str>>,
    /// The stderr stream of an exec, and the exec of a stderr stream.
    pub stderr: Option<u32>,
    pub parent: Option<u32>,
    pub opened: Option<Vec<u8>>,
    pub opened_sent: bool,
    pub send: Send,
    pub receive: Receive,
    pub end: Option<Vec<u8>>,
    pub end_sent: bool,
    /// Of a stream that the guest opened: the host ended it.
    pub over: bool,
}

/// Guest → host.
pub struct Send {
    pub bytes: Bytes,
    pub sent: u64,
    pub limit: u64,
    pub finished: bool,
    pub eof_sent: bool,
    /// The host closed this stream at a re-attach: the process may go on, nobody listens.
    pub discard: bool,
}

/// Host → guest.
pub struct Receive {
    pub bytes: Bytes,
    pub window: u64,
    pub limit_told: u64,
    pub consumed_told: u64,
    pub eof: bool,
    /// False: the operation takes no data, or its reader is gone.
    pub wanted: bool,
    pub tell_again: bool,
}

impl Stream {
    pub fn new(op: &str, command: Option<&str>) -> Self {
        Stream {
            op: op.into(),
            command: command.map(Into::into),
            stderr: None,
            parent: None,
            opened: None,
            opened_sent: false,
            send: Send {
                bytes: Bytes::default(),
                sent: 0,
                limit: WINDOW_BYTES_START,
                finished: false,
                eof_sent: false,
                discard: false,
            },
            receive: Receive {
                bytes: Bytes::default(),
                window: WINDOW_BYTES_START,
                limit_told: WINDOW_BYTES_START,
                consumed_told: 0,
                eof: false,
                wanted: false,
                tell_again: false,
            },
            end: None,
            end_sent: false,
            over: false,
        }
    }

    pub fn held(&self) -> usize {
        self.send.bytes.len() + self.receive.bytes.len()
    }

    pub fn recycle(&mut self, pool: &mut Pool) {
        self.send.bytes.recycle(pool);
        self.receive.bytes.recycle(pool);
    }
}

impl Send {
    /// Nothing of this direction is still to be sent.
    pub fn is_done(&self) -> bool {
        self.discard || !self.finished || self.eof_sent
    }

    fn sendable(&self) -> usize {
        let end = self.bytes.end().min(self.limit);
        (end.saturating_sub(self.sent) as usize).min(PAYLOAD_BYTES_MAX)
    }

    /// At most one DATA frame, and EOF when it was the last. True: more could be sent at once.
    pub fn emit(&mut self, id: u32, out: &mut Outbox) -> bool {
        if self.discard {
            return false;
        }
        let count = self.sendable();
        if count > 0 {
            out.push_with(Kind::Data, id, |payload| self.bytes.copy(self.sent, count, payload));
            self.sent += count as u64;
        }
        if self.finished && !self.eof_sent && self.sent == self.bytes.end() {
            out.push(Kind::Eof, id, &self.sent.to_le_bytes());
            self.eof_sent = true;
        }
        self.sendable() > 0
    }
}

impl Receive {
    pub fn received(&self) -> u64 {
        self.bytes.end()
    }

    /// CREDIT, when it says enough news to be worth a frame.
    pub fn emit(&mut self, id: u32, out: &mut Outbox) {
        let (consumed, limit) = (self.received(), self.bytes.start() + self.window);
        let more = limit.saturating_sub(self.limit_told);
        // On a stream of the guest's nobody waits to hear what was consumed: only room is news, and only much of it.
        let heard = !is_guests(id) && (consumed > self.consumed_told || (more > 0 && self.bytes.is_empty()));
        let news = heard || more >= self.window / 4;
        if self.eof && consumed == self.consumed_told && !self.tell_again {
            return;
        }
        if self.tell_again || news {
            self.limit_told = self.limit_told.max(limit);
            self.consumed_told = consumed;
            self.tell_again = false;
            out.push_with(Kind::Credit, id, |payload| {
                payload.extend_from_slice(&consumed.to_le_bytes());
                payload.extend_from_slice(&self.limit_told.to_le_bytes());
            });
        }
    }
}
