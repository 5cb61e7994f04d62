//! One frame, and how it becomes bytes.

use crate::limits::{HEADER_BYTES, PAYLOAD_BYTES_MAX, TRAILER_BYTES};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Hello = 1,
    Open = 2,
    Opened = 3,
    Data = 4,
    Credit = 5,
    Eof = 6,
    End = 7,
    Confirm = 8,
    Abort = 9,
    Tell = 10,
    Ping = 11,
    Pong = 12,
    Reset = 13,
    State = 14,
    Resume = 15,
}

impl Kind {
    pub const ALL: [Kind; 15] = [
        Kind::Hello,
        Kind::Open,
        Kind::Opened,
        Kind::Data,
        Kind::Credit,
        Kind::Eof,
        Kind::End,
        Kind::Confirm,
        Kind::Abort,
        Kind::Tell,
        Kind::Ping,
        Kind::Pong,
        Kind::Reset,
        Kind::State,
        Kind::Resume,
    ];

    pub fn from_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(byte).wrapping_sub(1)).copied()
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Hello => "HELLO",
            Kind::Open => "OPEN",
            Kind::Opened => "OPENED",
            Kind::Data => "DATA",
            Kind::Credit => "CREDIT",
            Kind::Eof => "EOF",
            Kind::End => "END",
            Kind::Confirm => "CONFIRM",
            Kind::Abort => "ABORT",
            Kind::Tell => "TELL",
            Kind::Ping => "PING",
            Kind::Pong => "PONG",
            Kind::Reset => "RESET",
            Kind::State => "STATE",
            Kind::Resume => "RESUME",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub kind: Kind,
    pub stream: u32,
    pub payload: &'a [u8],
}

/// Appends one frame to `out`.
pub fn encode(kind: Kind, stream: u32, payload: &[u8], out: &mut Vec<u8>) {
    encode_with(kind, stream, out, |bytes| bytes.extend_from_slice(payload));
}

/// Appends one frame whose payload `write` appends, so that bulk data is copied once.
///
/// # Panics
/// If `write` appends more than a frame may hold: the caller's error, never the peer's.
pub fn encode_with(kind: Kind, stream: u32, out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let begin = out.len();
    out.push(kind as u8);
    out.extend_from_slice(&stream.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    write(out);
    let length = out.len() - begin - HEADER_BYTES;
    assert!(length <= PAYLOAD_BYTES_MAX, "payload of {length} bytes");
    out[begin + 5..begin + HEADER_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
    let crc = crc32fast::hash(&out[begin..]);
    out.extend_from_slice(&crc.to_le_bytes());
    debug_assert_eq!(out.len() - begin, HEADER_BYTES + length + TRAILER_BYTES);
}
