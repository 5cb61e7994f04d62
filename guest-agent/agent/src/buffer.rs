//! Bytes of one direction, addressed by their absolute offset in the stream.

use std::collections::VecDeque;

const CHUNK_BYTES: usize = 65_536;
const SMALL_BYTES: usize = 4_096;
const POOL_CHUNKS_MAX: usize = 24;

/// Used chunks, kept while streams live: fresh pages are dear under gVisor.
#[derive(Default)]
pub struct Pool(Vec<Vec<u8>>);

impl Pool {
    fn take(&mut self) -> Vec<u8> {
        self.0.pop().unwrap_or_else(|| Vec::with_capacity(CHUNK_BYTES))
    }

    fn give(&mut self, mut chunk: Vec<u8>) {
        if chunk.capacity() == CHUNK_BYTES && self.0.len() < POOL_CHUNKS_MAX {
            chunk.clear();
            self.0.push(chunk);
        }
    }

    pub fn clear(&mut self) {
        self.0 = Vec::new();
    }
}

/// A byte queue that remembers the offset of its first byte.
#[derive(Default)]
pub struct Bytes {
    chunks: VecDeque<Vec<u8>>,
    /// Offset of the first byte of the first chunk; ≤ `start`, because a chunk is freed whole.
    base: u64,
    start: u64,
    end: u64,
}

impl Bytes {
    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn end(&self) -> u64 {
        self.end
    }

    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub fn append(&mut self, mut bytes: &[u8], pool: &mut Pool) {
        self.end += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = self.chunks.back().map_or(0, |chunk| chunk.capacity() - chunk.len());
            if room == 0 {
                let small = self.chunks.is_empty() && bytes.len() <= SMALL_BYTES;
                self.chunks.push_back(if small { Vec::with_capacity(SMALL_BYTES) } else { pool.take() });
                continue;
            }
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.chunks.back_mut().expect("a chunk with room").extend_from_slice(now);
            bytes = later;
        }
    }

    /// Bytes that went by without being kept; only when nothing else is.
    pub fn pass(&mut self, count: usize) {
        debug_assert!(self.is_empty());
        self.end += count as u64;
        self.start = self.end;
        self.base = self.end;
    }

    /// Contiguous bytes at `offset`, which lies in `start..=end`; empty only at the end.
    pub fn at(&self, offset: u64) -> &[u8] {
        debug_assert!(self.start <= offset && offset <= self.end);
        let mut skip = (offset - self.base) as usize;
        for chunk in &self.chunks {
            if skip < chunk.len() {
                return &chunk[skip..];
            }
            skip -= chunk.len();
        }
        &[]
    }

    /// Copies up to `count` bytes from `offset` on.
    pub fn copy(&self, mut offset: u64, mut count: usize, out: &mut Vec<u8>) {
        while count > 0 {
            let run = self.at(offset);
            let run = &run[..run.len().min(count)];
            if run.is_empty() {
                return;
            }
            out.extend_from_slice(run);
            offset += run.len() as u64;
            count -= run.len();
        }
    }

    /// Everything before `offset` is no longer needed.
    pub fn release(&mut self, offset: u64, pool: &mut Pool) {
        self.start = offset.clamp(self.start, self.end);
        while let Some(chunk) = self.chunks.front() {
            let length = chunk.len() as u64;
            // A last chunk with room left stays: the next byte goes there.
            if self.base + length > self.start || (self.chunks.len() == 1 && chunk.len() < chunk.capacity()) {
                break;
            }
            self.base += length;
            pool.give(self.chunks.pop_front().expect("there is a front"));
        }
        if self.is_empty() {
            self.base = self.end;
            if let Some(chunk) = self.chunks.front_mut() {
                chunk.clear();
            }
        }
    }

    /// Everything from `offset` on is forgotten.
    pub fn truncate(&mut self, offset: u64) {
        let keep = offset.clamp(self.start, self.end);
        let mut excess = (self.end - keep) as usize;
        self.end = keep;
        while excess > 0 {
            let Some(chunk) = self.chunks.back_mut() else { return };
            let cut = excess.min(chunk.len());
            chunk.truncate(chunk.len() - cut);
            excess -= cut;
            if chunk.is_empty() {
                self.chunks.pop_back();
            }
        }
    }

    pub fn recycle(&mut self, pool: &mut Pool) {
        self.chunks.drain(..).for_each(|chunk| pool.give(chunk));
        self.start = self.end;
        self.base = self.end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &Bytes, offset: u64, count: usize) -> Vec<u8> {
        let mut out = Vec::new();
        bytes.copy(offset, count, &mut out);
        out
    }

    #[test]
    fn keeps_offsets_over_chunks() {
        let (mut bytes, mut pool) = (Bytes::default(), Pool::default());
        let all: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
        for piece in all.chunks(7_777) {
            bytes.append(piece, &mut pool);
        }
        assert_eq!(read(&bytes, 0, usize::MAX), all);
        assert_eq!(read(&bytes, 70_000, 5), all[70_000..70_005]);
        bytes.release(150_001, &mut pool);
        assert_eq!(bytes.len(), 149_999);
        assert_eq!(read(&bytes, 150_001, usize::MAX), all[150_001..]);
        bytes.truncate(200_000);
        assert_eq!(read(&bytes, 199_999, 10), all[199_999..200_000]);
        bytes.append(b"xyz", &mut pool);
        assert_eq!(read(&bytes, 200_000, 10), b"xyz");
        bytes.release(200_003, &mut pool);
        assert!(bytes.is_empty());
        bytes.append(b"more", &mut pool);
        assert_eq!((bytes.start(), read(&bytes, 200_003, 9)), (200_003, b"more".to_vec()));
        bytes.release(200_007, &mut pool);
        bytes.pass(3);
        bytes.append(b"after", &mut pool);
        assert_eq!((bytes.start(), read(&bytes, 200_010, 9)), (200_010, b"after".to_vec()));
    }

    #[test]
    fn small_then_released_many_times() {
        let (mut bytes, mut pool) = (Bytes::default(), Pool::default());
        for round in 0..10_000u64 {
            bytes.append(&round.to_le_bytes(), &mut pool);
            assert_eq!(bytes.at(round * 8), round.to_le_bytes());
            bytes.release((round + 1) * 8, &mut pool);
        }
        assert!(bytes.chunks.len() <= 1);
    }
}
