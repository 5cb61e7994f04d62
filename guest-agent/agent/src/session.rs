//! The channel's bookkeeping: streams and credit. Pure: frames in, events out; `sending.rs` says what goes out next.
//!
//! What a stream still has to send is derived from its state and never queued as frames, so a
//! re-attach (`reattach.rs`) only moves positions back.

use crate::buffer::Pool;
use crate::guest::{is_guests, Guest};
use crate::outbox::Outbox;
use crate::stream::Stream;
use cloche_protocol::limits::*;
use cloche_protocol::{Frame, Kind};
use std::collections::{BTreeMap, BTreeSet};

const PONGS_WAITING_MAX: usize = 64;
/// Receive windows grow while their sum stays below this; the rest is for output.
const RECEIVE_WINDOWS_MAX: u64 = WINDOWS_BYTES_PER_SANDBOX_MAX / 2;

#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Open {
        stream: u32,
        payload: Vec<u8>,
    },
    /// Bytes or the end of bytes arrived for the operation.
    Input(u32),
    /// The host takes more output.
    Room(u32),
    Tell {
        stream: u32,
        payload: Vec<u8>,
    },
    Abort(u32),
    /// The host recorded the end: nothing of the stream is needed any more.
    Forget(u32),
    /// The host gave the stream up at a re-attach: stop it.
    Close(u32),
    /// The host ended a stream of ours.
    Ended {
        stream: u32,
        payload: Vec<u8>,
    },
}

#[derive(Default)]
pub struct Session {
    pub(crate) streams: BTreeMap<u32, Stream>,
    pub(crate) highest_host: u32,
    pub(crate) guest: Guest,
    /// Between RESET and RESUME: the nonce to wait for.
    pub(crate) silent: Option<[u8; NONCE_BYTES]>,
    pub(crate) ready: BTreeSet<u32>,
    pub(crate) hello: String,
    pub(crate) pool: Pool,
    pub out: Outbox,
    pongs: usize,
    pub(crate) cursor: u32,
    pub(crate) held: usize,
    receive_windows: u64,
    starved: bool,
}

impl Session {
    pub fn new(hello: String) -> Self {
        let mut session = Session { hello, ..Session::default() };
        session.out.push(Kind::Hello, 0, session.hello.as_bytes());
        session
    }

    pub fn handle(&mut self, frame: Frame<'_>, events: &mut Vec<Event>) {
        match frame.kind {
            Kind::Reset => return self.on_reset(&frame, events),
            Kind::Resume => return self.on_resume(&frame, events),
            _ if self.silent.is_some() => return,
            _ => {}
        }
        let id = frame.stream;
        match frame.kind {
            Kind::Open => self.on_open(&frame, events),
            Kind::Data => self.on_data(&frame, events),
            Kind::Eof => self.on_eof(&frame, events),
            Kind::Credit => self.on_credit(&frame, events),
            Kind::Confirm => self.on_confirm(id, events),
            Kind::End => self.on_end(&frame, events),
            Kind::Ping => self.on_ping(&frame),
            Kind::Abort if self.runs(id) => events.push(Event::Abort(id)),
            Kind::Tell if self.runs(id) => {
                events.push(Event::Tell { stream: id, payload: frame.payload.to_vec() });
            }
            // The rest is the guest's to send, or late: a host that errs is a bug, not an attack.
            _ => {}
        }
    }

    fn runs(&self, id: u32) -> bool {
        !is_guests(id) && self.streams.get(&id).is_some_and(|s| s.end.is_none() && s.parent.is_none())
    }

    fn on_open(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let id = frame.stream;
        if id == 0 || id % 2 != 0 {
            return;
        }
        if id <= self.highest_host && !self.streams.contains_key(&id) {
            return;
        }
        events.push(Event::Open { stream: id, payload: frame.payload.to_vec() });
    }

    /// A new stream; false: there are too many, and the caller refuses it.
    pub fn open(&mut self, id: u32, op: &str, command: Option<&str>, stderr: Option<u32>) -> bool {
        self.highest_host = self.highest_host.max(id).max(stderr.unwrap_or(0));
        let hosts = self.streams.keys().filter(|id| !is_guests(**id)).count();
        if hosts + 1 + usize::from(stderr.is_some()) > STREAMS_PER_OPENER_MAX {
            return false;
        }
        let mut stream = Stream::new(op, command);
        stream.stderr = stderr;
        self.insert(id, stream);
        if let Some(stderr_id) = stderr {
            let mut stream = Stream::new("exec.stderr", command);
            stream.parent = Some(id);
            self.insert(stderr_id, stream);
        }
        true
    }

    pub(crate) fn insert(&mut self, id: u32, stream: Stream) {
        self.receive_windows += stream.receive.window;
        self.streams.insert(id, stream);
    }

    /// END for a stream that was never entered; it is not kept.
    pub fn refuse(&mut self, id: u32, end: &[u8]) {
        self.highest_host = self.highest_host.max(id);
        if self.silent.is_none() {
            self.out.push(Kind::End, id, end);
        }
    }

    pub fn is_open(&self, id: u32) -> bool {
        self.streams.contains_key(&id)
    }

    pub fn command_of(&self, id: u32) -> Option<&str> {
        self.streams.get(&id)?.command.as_deref()
    }

    pub fn op_of(&self, id: u32) -> Option<&str> {
        Some(&self.streams.get(&id)?.op)
    }

    /// The command whose stderr this is, or the stream itself.
    pub fn owner_of(&self, id: u32) -> u32 {
        self.streams.get(&id).and_then(|stream| stream.parent).unwrap_or(id)
    }

    pub fn may_open(&self, id: u32) -> bool {
        id > self.highest_host
    }

    /// The same OPEN again: answer with the present state.
    pub fn answer_again(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.opened_sent = false;
            stream.end_sent = false;
            self.ready.insert(id);
        }
    }

    fn on_data(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let Some(stream) = self.streams.get_mut(&frame.stream).filter(|s| !s.over) else { return };
        let receive = &mut stream.receive;
        let end = receive.received() + frame.payload.len() as u64;
        if receive.eof || end > receive.limit_told || frame.payload.is_empty() {
            return;
        }
        receive.bytes.append(frame.payload, &mut self.pool);
        self.held += frame.payload.len();
        if receive.wanted {
            events.push(Event::Input(frame.stream));
        } else if stream.opened.is_some() || stream.end.is_some() {
            self.taken(frame.stream, frame.payload.len());
        }
        self.ready.insert(frame.stream);
    }

    fn on_eof(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let Some(stream) = self.streams.get_mut(&frame.stream) else { return };
        let Ok(offset) = frame.payload.try_into().map(u64::from_le_bytes) else { return };
        if !stream.receive.eof && offset == stream.receive.received() {
            stream.receive.eof = true;
            if stream.receive.wanted {
                events.push(Event::Input(frame.stream));
            }
        }
    }

    fn on_credit(&mut self, frame: &Frame<'_>, events: &mut Vec<Event>) {
        let Some(stream) = self.streams.get_mut(&frame.stream) else { return };
        let Some((consumed, limit)) = frame.payload.split_first_chunk::<8>() else { return };
        let Ok(limit) = limit.try_into().map(u64::from_le_bytes) else { return };
        let consumed = u64::from_le_bytes(*consumed);
        let send = &mut stream.send;
        // What we sent on a stream of ours is kept by nobody, whatever the host has taken.
        let known = is_guests(frame.stream) || consumed >= send.bytes.start();
        if consumed > send.sent || !known || limit < send.limit {
            return;
        }
        // However much the host offers, a window is at most 1 MiB of our memory.
        send.limit = limit.min(consumed + WINDOW_BYTES_MAX).max(send.limit);
        let before = send.bytes.len();
        send.bytes.release(consumed, &mut self.pool);
        self.held -= before - send.bytes.len();
        self.ready.insert(frame.stream);
        if std::mem::take(&mut self.starved) {
            events.extend(self.streams.keys().map(|id| Event::Room(*id)));
        } else {
            events.push(Event::Room(frame.stream));
        }
    }

    fn on_confirm(&mut self, id: u32, events: &mut Vec<Event>) {
        if !is_guests(id) && self.streams.get(&id).is_some_and(|stream| stream.end_sent) {
            self.remove(id);
            events.push(Event::Forget(id));
        }
    }

    pub(crate) fn remove(&mut self, id: u32) {
        let Some(mut stream) = self.streams.remove(&id) else { return };
        self.held -= stream.held();
        self.receive_windows -= stream.receive.window;
        self.ready.remove(&id);
        stream.recycle(&mut self.pool);
        if let Some(stderr) = stream.stderr {
            self.remove(stderr);
        }
        if self.streams.is_empty() {
            self.pool.clear();
            self.out.shrink();
        }
    }

    fn on_ping(&mut self, frame: &Frame<'_>) {
        if self.out.is_empty() {
            self.pongs = 0;
        }
        if frame.stream == 0 && frame.payload.len() <= PING_BYTES_MAX && self.pongs < PONGS_WAITING_MAX {
            self.pongs += 1;
            self.out.push(Kind::Pong, 0, frame.payload);
        }
    }

    // What operations say.

    pub fn opened(&mut self, id: u32, json: String) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.opened = Some(json.into_bytes());
            self.ready.insert(id);
        }
    }

    /// The operation takes data from the host.
    pub fn want_input(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.receive.wanted = true;
        }
    }

    /// How many bytes of output may be read now.
    pub fn room(&mut self, id: u32) -> usize {
        let Some(stream) = self.streams.get(&id) else { return 0 };
        if stream.send.discard {
            return usize::MAX;
        }
        let window = stream.send.limit.saturating_sub(stream.send.bytes.end()) as usize;
        let budget = (WINDOWS_BYTES_PER_SANDBOX_MAX as usize).saturating_sub(self.held);
        self.starved |= budget < window;
        window.min(budget)
    }

    pub fn output(&mut self, id: u32, bytes: &[u8]) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if !stream.send.discard {
            stream.send.bytes.append(bytes, &mut self.pool);
            self.held += bytes.len();
            self.ready.insert(id);
        }
    }

    pub fn output_end(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.send.finished = true;
            self.ready.insert(id);
        }
    }

    pub fn output_bytes(&self, id: u32) -> u64 {
        self.streams.get(&id).map_or(0, |stream| stream.send.bytes.end())
    }

    pub fn input_bytes(&self, id: u32) -> u64 {
        self.streams.get(&id).map_or(0, |stream| stream.receive.bytes.start())
    }

    /// Output that was not sent yet is dropped: the operation was aborted.
    pub fn output_cut(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            let before = stream.send.bytes.len();
            let sent = stream.send.sent;
            stream.send.bytes.truncate(sent);
            self.held -= before - stream.send.bytes.len();
        }
    }

    pub fn end(&mut self, id: u32, json: Vec<u8>) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.end = Some(json);
            self.ready.insert(id);
            self.drop_input(id);
        }
    }

    /// The next bytes for the operation to take.
    pub fn input(&self, id: u32) -> &[u8] {
        self.streams.get(&id).map_or(&[], |stream| stream.receive.bytes.at(stream.receive.bytes.start()))
    }

    pub fn input_is_over(&self, id: u32) -> bool {
        self.streams.get(&id).is_none_or(|s| s.receive.eof && s.receive.bytes.is_empty())
    }

    pub fn taken(&mut self, id: u32, count: usize) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let receive = &mut stream.receive;
        receive.bytes.release(receive.bytes.start() + count as u64, &mut self.pool);
        self.held -= count;
        self.took(id);
    }

    /// The window grows while it is drained.
    pub(crate) fn took(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let receive = &mut stream.receive;
        let growth = receive.window.min(WINDOW_BYTES_MAX - receive.window);
        let drained = receive.bytes.is_empty() && receive.received() >= receive.window;
        if drained && self.receive_windows + growth <= RECEIVE_WINDOWS_MAX {
            receive.window += growth;
            self.receive_windows += growth;
        }
        self.ready.insert(id);
    }

    /// Nobody reads the input any more: what comes is taken and dropped.
    pub fn drop_input(&mut self, id: u32) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.receive.wanted = false;
        let waiting = stream.receive.bytes.len();
        self.taken(id, waiting);
    }
}
