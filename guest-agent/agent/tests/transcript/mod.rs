//! A session without descriptors: frames in, and each frame it says as a text.

use cloche_guest::session::{Event, Session};
use cloche_protocol::{Decoder, Frame, Kind};

pub const NONCE: [u8; 16] = [7; 16];

pub struct Host {
    pub session: Session,
    decoder: Decoder,
    events: Vec<Event>,
}

impl Host {
    pub fn new() -> Self {
        let mut host = Host { session: Session::new("{}".into()), decoder: Decoder::new(), events: vec![] };
        assert_eq!(host.read(), ["HELLO 0 {}"]);
        host
    }

    pub fn send(&mut self, kind: Kind, stream: u32, payload: &[u8]) -> Vec<Event> {
        self.session.handle(Frame { kind, stream, payload }, &mut self.events);
        std::mem::take(&mut self.events)
    }

    /// OPEN, accepted as the loop would.
    pub fn open(&mut self, id: u32, op: &str, stderr: Option<u32>) {
        let events = self.send(Kind::Open, id, b"{}");
        assert_eq!(events, [Event::Open { stream: id, payload: b"{}".to_vec() }]);
        assert!(self.session.open(id, op, Some("c1"), stderr));
    }

    pub fn credit(&mut self, id: u32, consumed: u64, limit: u64) -> Vec<Event> {
        let payload = [consumed.to_le_bytes(), limit.to_le_bytes()].concat();
        self.send(Kind::Credit, id, &payload)
    }

    pub fn eof(&mut self, id: u32, offset: u64) -> Vec<Event> {
        self.send(Kind::Eof, id, &offset.to_le_bytes())
    }

    pub fn with_nonce(&mut self, kind: Kind, json: &str) -> Vec<Event> {
        self.send(kind, 0, &[&NONCE[..], json.as_bytes()].concat())
    }

    /// Everything the guest has to say, one text a frame.
    pub fn read(&mut self) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            self.session.fill();
            let more = self.take(usize::MAX);
            if more.is_empty() {
                return seen;
            }
            seen.extend(more);
        }
    }

    /// As `read`, but the carrier takes only `count` bytes.
    pub fn take(&mut self, count: usize) -> Vec<String> {
        let pending = self.session.out.pending();
        let bytes = pending[..pending.len().min(count)].to_vec();
        self.session.out.wrote(bytes.len());
        self.decoder.push(&bytes);
        let mut seen = Vec::new();
        while let Some(frame) = self.decoder.next() {
            seen.push(show(frame.expect("the guest sends good frames")));
        }
        seen
    }
}

fn show(frame: Frame<'_>) -> String {
    let number = |at: usize| u64::from_le_bytes(frame.payload[at..at + 8].try_into().expect("8 bytes"));
    let body = match frame.kind {
        Kind::Credit => format!("{} {}", number(0), number(8)),
        Kind::Eof => number(0).to_string(),
        Kind::Data if frame.payload.len() > 16 => format!("[{}]", frame.payload.len()),
        Kind::State => String::from_utf8_lossy(&frame.payload[16..]).into_owned(),
        _ => String::from_utf8_lossy(frame.payload).into_owned(),
    };
    format!("{} {} {body}", frame.kind.name(), frame.stream)
}
