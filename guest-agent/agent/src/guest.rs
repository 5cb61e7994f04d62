//! Streams that the guest opens (odd ids). They die at a re-attach, so nothing of them is kept to be sent again.

use crate::sending::FLUSH_BYTES;
use crate::session::{Event, Session};
use crate::stream::Stream;
use cloche_protocol::limits::PAYLOAD_BYTES_MAX;
use cloche_protocol::{Frame, Kind};

/// What a session knows of the guest's own streams, besides the streams themselves.
#[derive(Default)]
pub struct Guest {
    pub highest: u32,
    pub count: usize,
    /// OPENs not yet among the frames. They go out in the order of their ids, before anything else.
    pub opens: std::collections::VecDeque<(u32, Vec<u8>)>,
}

pub fn is_guests(id: u32) -> bool {
    id % 2 == 1
}

impl Session {
    /// OPEN; data may be given at once, within the first window. None: this boot has used up its ids.
    pub fn open_out(&mut self, op: &str, open: Vec<u8>) -> Option<u32> {
        let id = match self.guest.highest {
            0 => 1,
            highest => highest.checked_add(2)?,
        };
        self.guest.highest = id;
        self.guest.count += 1;
        self.guest.opens.push_back((id, open));
        let mut stream = Stream::new(op, None);
        // The host's OPENED tells nothing that is waited for.
        stream.opened = Some(Vec::new());
        stream.opened_sent = true;
        self.insert(id, stream);
        self.ready.insert(id);
        Some(id)
    }

    /// Streams of the guest that the host has not ended.
    pub fn guest_streams(&self) -> usize {
        self.guest.count
    }

    pub(crate) fn send_opens(&mut self) {
        while let Some((id, open)) = self.guest.opens.pop_front() {
            self.out.push(Kind::Open, id, &open);
        }
    }

    /// Nobody here wants the stream any more. The host still answers END, and until then it counts.
    pub fn abort_out(&mut self, id: u32) {
        if let Some(at) = self.guest.opens.iter().position(|(queued, _)| *queued == id) {
            // The host never heard of it.
            self.guest.opens.remove(at);
            return self.forget_out(id);
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.over {
            return self.forget_out(id);
        }
        self.held -= stream.send.bytes.len();
        stream.send.bytes.recycle(&mut self.pool);
        stream.send.discard = true;
        self.drop_input(id);
        self.out.push(Kind::Abort, id, br#"{"reason":"the client is gone"}"#);
    }

    /// END of the host. What it had sent before can still be read; `forget_out` when that is done.
    pub(crate) fn on_end(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let id = frame.stream;
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.over && is_guests(id)) else {
            return;
        };
        stream.over = true;
        stream.receive.eof = true;
        self.held -= stream.send.bytes.len();
        stream.send.bytes.recycle(&mut self.pool);
        stream.send.discard = true;
        self.guest.count -= 1;
        self.out.push(Kind::Confirm, id, b"");
        events.push(Event::Ended { stream: id, payload: frame.payload.to_vec() });
    }

    /// Bytes for the host, read straight into a frame. None: there are others before them, or frames enough.
    ///
    /// # Safety
    /// As for `Outbox::push_read`.
    pub unsafe fn read_out<T>(
        &mut self,
        id: u32,
        most: usize,
        read: impl FnOnce(*mut u8, usize) -> (usize, T),
    ) -> Option<(usize, T)> {
        if self.silent.is_some() || self.out.pending().len() >= FLUSH_BYTES {
            return None;
        }
        self.send_opens();
        let send = &mut self.streams.get_mut(&id)?.send;
        if !send.bytes.is_empty() || send.discard {
            return None;
        }
        let most = most.min(PAYLOAD_BYTES_MAX);
        let done = self.out.push_read(Kind::Data, id, most, |room| read(room, most));
        send.bytes.pass(done.0);
        send.sent += done.0 as u64;
        Some(done)
    }

    /// Data of the host for which there is nothing to wait, given to `write` before it is kept; what `write` did not take.
    pub fn pass_in<'a>(&mut self, frame: Frame<'a>, write: impl FnOnce(&[u8]) -> usize) -> Frame<'a> {
        let fits = |stream: &&mut Stream| {
            let receive = &stream.receive;
            let end = receive.received() + frame.payload.len() as u64;
            receive.wanted && !receive.eof && receive.bytes.is_empty() && end <= receive.limit_told
        };
        let Some(stream) = self.streams.get_mut(&frame.stream).filter(fits) else { return frame };
        if self.silent.is_some() || frame.payload.is_empty() {
            return frame;
        }
        let count = write(frame.payload);
        stream.receive.bytes.pass(count);
        self.took(frame.stream);
        Frame { payload: &frame.payload[count..], ..frame }
    }

    pub fn forget_out(&mut self, id: u32) {
        let Some(stream) = self.streams.get(&id).filter(|_| is_guests(id)) else { return };
        self.guest.count -= usize::from(!stream.over);
        self.remove(id);
    }

    /// A new host knows none of the guest's streams.
    pub(crate) fn drop_guests(&mut self, events: &mut Vec<Event>) {
        self.guest.opens.clear();
        let ids: Vec<u32> = self.streams.keys().copied().filter(|id| is_guests(*id)).collect();
        for id in ids {
            self.forget_out(id);
            events.push(Event::Close(id));
        }
    }
}
