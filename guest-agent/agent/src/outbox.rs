//! Frames on their way to the carrier: one buffer, so that one write carries many frames.

use cloche_protocol::{encode_with, Kind};
use std::collections::VecDeque;

#[derive(Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    written: usize,
    /// Where each frame ends in `bytes`: a RESET keeps only the frame that is half written.
    ends: VecDeque<usize>,
    /// Where the first frame not wholly written begins.
    begin: usize,
}

impl Outbox {
    pub fn push(&mut self, kind: Kind, stream: u32, payload: &[u8]) {
        self.push_with(kind, stream, |out| out.extend_from_slice(payload));
    }

    pub fn push_with(&mut self, kind: Kind, stream: u32, write: impl FnOnce(&mut Vec<u8>)) {
        encode_with(kind, stream, &mut self.bytes, write);
        self.ends.push_back(self.bytes.len());
    }

    /// A frame whose payload `read` puts into the room given to it; none, if it puts nothing there.
    ///
    /// # Safety
    /// `read` must have written as many bytes from the pointer on as it says, at most `most`.
    pub unsafe fn push_read<T>(
        &mut self,
        kind: Kind,
        stream: u32,
        most: usize,
        read: impl FnOnce(*mut u8) -> (usize, T),
    ) -> (usize, T) {
        let begin = self.bytes.len();
        let mut done = None;
        encode_with(kind, stream, &mut self.bytes, |bytes| {
            bytes.reserve(most);
            let (count, result) = read(bytes.spare_capacity_mut().as_mut_ptr().cast());
            assert!(count <= most);
            bytes.set_len(bytes.len() + count);
            done = Some((count, result));
        });
        let (count, result) = done.expect("encode_with calls it");
        match count {
            0 => self.bytes.truncate(begin),
            _ => self.ends.push_back(self.bytes.len()),
        }
        (count, result)
    }

    pub fn pending(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    pub fn is_empty(&self) -> bool {
        self.written == self.bytes.len()
    }

    pub fn wrote(&mut self, count: usize) {
        self.written += count;
        while let Some(end) = self.ends.front().copied().filter(|end| *end <= self.written) {
            self.ends.pop_front();
            self.begin = end;
        }
        if self.is_empty() {
            self.bytes.clear();
            self.written = 0;
            self.begin = 0;
        }
    }

    /// Drops every frame of which no byte has been written.
    pub fn drop_unwritten(&mut self) {
        let Some(first) = self.ends.front().copied() else { return };
        let keep = if self.written > self.begin { first } else { self.begin };
        self.bytes.truncate(keep);
        self.ends.retain(|end| *end <= keep);
        self.wrote(0);
    }

    pub fn shrink(&mut self) {
        if self.is_empty() {
            self.bytes = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cloche_protocol::Decoder;

    #[test]
    fn a_half_written_frame_is_finished_and_the_rest_dropped() {
        let mut out = Outbox::default();
        for text in ["one", "two", "three"] {
            out.push(Kind::Data, 2, text.as_bytes());
        }
        let mut decoder = Decoder::new();
        let first = out.pending()[..20].to_vec();
        decoder.push(&first);
        out.wrote(20);
        out.drop_unwritten();
        out.push(Kind::State, 0, b"state");
        decoder.push(out.pending());
        let mut seen = Vec::new();
        while let Some(frame) = decoder.next() {
            seen.push(frame.expect("no damage").payload.to_vec());
        }
        assert_eq!(seen, [&b"one"[..], b"two", b"state"]);
        out.wrote(out.pending().len());
        out.push(Kind::Data, 2, b"x");
        out.drop_unwritten();
        assert!(out.is_empty());
    }
}
