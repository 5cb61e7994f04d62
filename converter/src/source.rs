//! Where an archive's bytes come from: a stream with a position that can be skipped through.

use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};

pub trait Source {
    /// Bytes that are there; empty only at the end.
    fn fill(&mut self) -> io::Result<&[u8]>;
    fn consume(&mut self, count: usize);

    /// Passes over `count` bytes; `false` when the end comes first.
    fn skip(&mut self, mut count: u64) -> io::Result<bool> {
        while count > 0 {
            let there = self.fill()?.len();
            if there == 0 {
                return Ok(false);
            }
            let step = count.min(there as u64);
            self.consume(step as usize);
            count -= step;
        }
        Ok(true)
    }

    /// Reads up to `buffer.len()` bytes; fewer only at the end.
    fn read_full(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            let there = self.fill()?;
            if there.is_empty() {
                break;
            }
            let count = there.len().min(buffer.len() - done);
            buffer[done..done + count].copy_from_slice(&there[..count]);
            self.consume(count);
            done += count;
        }
        Ok(done)
    }
}

/// Anything that is read once, front to back: a pipe, or bytes in memory.
pub struct Stream<R: Read>(BufReader<R>);

const BUFFER_BYTES: usize = 256 << 10;

impl<R: Read> Stream<R> {
    pub fn new(inner: R) -> Self {
        Stream(BufReader::with_capacity(BUFFER_BYTES, inner))
    }
}

impl<R: Read> Source for Stream<R> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        self.0.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.0.consume(count);
    }
}

/// A regular file: content that nobody wants is not read.
pub struct Seekable<R: Read + Seek> {
    inner: BufReader<R>,
    left: u64,
}

impl<R: Read + Seek> Seekable<R> {
    pub fn new(mut inner: R) -> io::Result<Self> {
        let left = inner.seek(SeekFrom::End(0))?;
        inner.seek(SeekFrom::Start(0))?;
        Ok(Seekable { inner: BufReader::with_capacity(BUFFER_BYTES, inner), left })
    }
}

impl<R: Read + Seek> Source for Seekable<R> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        let there = self.inner.fill_buf()?;
        let count = there.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        Ok(&there[..count])
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
        self.left -= count as u64;
    }

    fn skip(&mut self, count: u64) -> io::Result<bool> {
        if count > self.left {
            return Ok(false);
        }
        self.left -= count;
        self.inner.seek_relative(count as i64)?;
        Ok(true)
    }
}
