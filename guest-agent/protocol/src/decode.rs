//! Bytes to frames, in whatever pieces they arrive.

use crate::frame::{Frame, Kind};
use crate::limits::{HEADER_BYTES, NONCE_BYTES, PAYLOAD_BYTES_MAX, TRAILER_BYTES};

const RESET_BYTES: usize = HEADER_BYTES + NONCE_BYTES + TRAILER_BYTES;
const RESET_HEADER: [u8; HEADER_BYTES] = [13, 0, 0, 0, 0, NONCE_BYTES as u8, 0, 0, 0];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    Kind,
    Length,
    Crc,
}

impl FrameError {
    pub fn name(self) -> &'static str {
        match self {
            FrameError::Kind => "kind",
            FrameError::Length => "length",
            FrameError::Crc => "crc",
        }
    }
}

/// Holds at most what the caller made room for; `next` never allocates.
///
/// After an error the bytes behind the bad frame's first byte are searched for a valid RESET, the
/// bad frame's own bytes included: a length that lies must not swallow the RESET behind it.
#[derive(Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    scanning: bool,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Room for at least `want` more bytes; say how many were put there with `filled`.
    pub fn space(&mut self, want: usize) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        if self.buffer.len() - self.end < want && self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.buffer.len() - self.end < want {
            self.buffer.resize(self.end + want, 0);
        }
        &mut self.buffer[self.end..]
    }

    pub fn filled(&mut self, count: usize) {
        self.end += count;
        assert!(self.end <= self.buffer.len());
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.space(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    pub fn is_scanning(&self) -> bool {
        self.scanning
    }

    /// The next frame, an error (once, when scanning begins), or None: more bytes are needed.
    #[allow(clippy::should_implement_trait)] // frames borrow the decoder
    pub fn next(&mut self) -> Option<Result<Frame<'_>, FrameError>> {
        if self.scanning && !self.find_reset() {
            return None;
        }
        self.scanning = false;
        let padding = self.held().iter().take_while(|byte| **byte == 0).count();
        self.start += padding;
        let held = self.held();
        let kind = match Kind::from_byte(*held.first()?) {
            Some(kind) => kind,
            None => return Some(Err(self.fail(FrameError::Kind))),
        };
        let header: &[u8; HEADER_BYTES] = held.first_chunk()?;
        let stream = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
        let length = u32::from_le_bytes([header[5], header[6], header[7], header[8]]) as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Some(Err(self.fail(FrameError::Length)));
        }
        let body = HEADER_BYTES + length;
        let crc: &[u8; TRAILER_BYTES] = held.get(body..)?.first_chunk()?;
        if crc32fast::hash(&held[..body]) != u32::from_le_bytes(*crc) {
            return Some(Err(self.fail(FrameError::Crc)));
        }
        let payload = self.start + HEADER_BYTES..self.start + body;
        self.start += body + TRAILER_BYTES;
        Some(Ok(Frame { kind, stream, payload: &self.buffer[payload] }))
    }

    fn held(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    fn fail(&mut self, error: FrameError) -> FrameError {
        self.start += 1;
        self.scanning = true;
        error
    }

    /// Moves `start` to a valid RESET (true), or to the last place where one may begin.
    fn find_reset(&mut self) -> bool {
        loop {
            let held = self.held();
            let Some(skip) = held.iter().position(|byte| *byte == RESET_HEADER[0]) else {
                self.start = self.end;
                return false;
            };
            self.start += skip;
            let candidate = self.held();
            let known = candidate.len().min(HEADER_BYTES);
            if candidate[..known] == RESET_HEADER[..known] {
                if candidate.len() < RESET_BYTES {
                    return false;
                }
                let (body, crc) = candidate[..RESET_BYTES].split_at(RESET_BYTES - TRAILER_BYTES);
                if crc32fast::hash(body).to_le_bytes() == *crc {
                    return true;
                }
            }
            self.start += 1;
        }
    }
}
