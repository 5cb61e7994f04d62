//! A layer's blob: read, hashed and decompressed, in one thread.

use crate::limits::Deadline;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome, Refusal};
use flate2::{Decompress, FlushDecompress, Status};
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};

const READ_BYTES: usize = 256 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    Gzip,
    Zstd,
    None,
}

/// The blob as it was downloaded. Never reads more than the blob's stated size and one byte.
pub struct Packed {
    file: File,
    size: u64,
    hasher: Sha256,
    buffer: Vec<u8>,
    at: usize,
    end: usize,
    pub read: u64,
}

impl Packed {
    pub fn new(file: File, size: u64) -> Self {
        Packed { file, size, hasher: Sha256::new(), buffer: vec![0; READ_BYTES], at: 0, end: 0, read: 0 }
    }

    fn fill(&mut self) -> io::Result<&[u8]> {
        if self.at == self.end && self.read <= self.size {
            let want = READ_BYTES.min((self.size - self.read) as usize + 1);
            self.end = self.file.read(&mut self.buffer[..want])?;
            self.at = 0;
            self.read += self.end as u64;
            self.hasher.update(&self.buffer[..self.end]);
        }
        Ok(&self.buffer[self.at..self.end])
    }

    /// Reads what the decompressor left, and compares with what the manifest said.
    pub fn verify(mut self, digest: &str) -> Outcome<()> {
        loop {
            let there = self.fill().map_err(|error| Refusal::of_read(&error, "layer"))?.len();
            if there == 0 {
                break;
            }
            self.at = self.end;
        }
        if self.read != self.size && !planted::off("length") {
            return refuse(Code::BadLength, format!("the layer is not {} bytes long", self.size));
        }
        if digest_text(self.hasher) != digest && !planted::off("digest") {
            return refuse(Code::BadDigest, "the layer's digest is another");
        }
        Ok(())
    }
}

impl Read for Packed {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let there = self.fill()?;
        let count = there.len().min(out.len());
        out[..count].copy_from_slice(&there[..count]);
        self.at += count;
        Ok(count)
    }
}

pub fn digest_text(hasher: Sha256) -> String {
    format!("sha256:{}", hex(&hasher.finalize()))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

enum Method {
    Gzip { inner: Decompress, inside: bool, members: u64 },
    Zstd { inner: Box<FrameDecoder>, inside: bool, frames: u64 },
    None,
}

pub struct Unpacked {
    pub packed: Packed,
    method: Method,
    deadline: Deadline,
}

fn broken(what: impl std::fmt::Display) -> Refusal {
    Refusal::new(Code::BadCompression, format!("cannot decompress: {what}"))
}

impl Unpacked {
    pub fn new(packed: Packed, compression: Compression, deadline: Deadline) -> Self {
        let method = match compression {
            Compression::Gzip => Method::Gzip { inner: Decompress::new_gzip(15), inside: false, members: 0 },
            Compression::Zstd => {
                Method::Zstd { inner: Box::new(FrameDecoder::new()), inside: false, frames: 0 }
            }
            Compression::None => Method::None,
        };
        Unpacked { packed, method, deadline }
    }

    /// Fills `out` as far as there is something; 0 at the end.
    pub fn read(&mut self, out: &mut [u8]) -> Outcome<usize> {
        match &mut self.method {
            Method::None => {
                let mut done = 0;
                while done < out.len() {
                    match self.packed.read(&mut out[done..]).map_err(|e| Refusal::of_read(&e, "layer"))? {
                        0 => break,
                        count => done += count,
                    }
                }
                Ok(done)
            }
            Method::Gzip { inner, inside, members } => {
                gunzip(&mut self.packed, inner, inside, members, out, &self.deadline)
            }
            Method::Zstd { inner, inside, frames } => {
                unzstd(&mut self.packed, inner, inside, frames, out, &self.deadline)
            }
        }
    }
}

/// One gzip member after the other, as RFC 1952 has it (seekable layers are made of thousands).
fn gunzip(
    packed: &mut Packed,
    inner: &mut Decompress,
    inside: &mut bool,
    members: &mut u64,
    out: &mut [u8],
    deadline: &Deadline,
) -> Outcome<usize> {
    let mut done = 0;
    while done < out.len() {
        let input = packed.fill().map_err(|error| Refusal::of_read(&error, "layer"))?;
        if input.is_empty() {
            if (*inside || *members == 0) && !planted::off("compression_end") {
                return Err(broken("it ends too early"));
            }
            break;
        }
        if !*inside {
            deadline.check()?;
            if *members > 0 {
                *inner = Decompress::new_gzip(15);
            }
            *inside = true;
            *members += 1;
        }
        let (read_before, made_before) = (inner.total_in(), inner.total_out());
        let status = inner.decompress(input, &mut out[done..], FlushDecompress::None);
        packed.at += (inner.total_in() - read_before) as usize;
        done += (inner.total_out() - made_before) as usize;
        match status {
            Ok(Status::StreamEnd) => {
                *inside = false;
                if planted::off("members") {
                    packed.at = packed.end;
                }
            }
            Ok(_) => {}
            Err(_) if planted::off("compression_garbage") => {
                packed.at = packed.end;
                *inside = false;
            }
            Err(error) => return Err(broken(error)),
        }
    }
    Ok(done)
}

/// One zstd frame after the other; skippable ones are skipped (zstd:chunked has them).
fn unzstd(
    packed: &mut Packed,
    inner: &mut FrameDecoder,
    inside: &mut bool,
    frames: &mut u64,
    out: &mut [u8],
    deadline: &Deadline,
) -> Outcome<usize> {
    loop {
        if *inside {
            let mut done = 0;
            while done < out.len() {
                if inner.can_collect() == 0 && !inner.is_finished() {
                    let want = BlockDecodingStrategy::UptoBytes(out.len() - done);
                    inner.decode_blocks(&mut *packed, want).map_err(broken)?;
                }
                let count = inner.read(&mut out[done..]).map_err(broken)?;
                done += count;
                if count == 0 && inner.is_finished() {
                    break;
                }
            }
            *inside = !(inner.is_finished() && inner.can_collect() == 0);
            if done > 0 {
                return Ok(done);
            }
            continue;
        }
        deadline.check()?;
        if packed.fill().map_err(|error| Refusal::of_read(&error, "layer"))?.is_empty() {
            return if *frames == 0 { Err(broken("it is empty")) } else { Ok(0) };
        }
        *frames += 1;
        match inner.reset(&mut *packed) {
            Ok(()) => *inside = true,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => {
                let length = u64::from(length);
                let skipped = io::copy(&mut (&mut *packed).take(length), &mut io::sink()).map_err(broken)?;
                if skipped != length {
                    return Err(broken("it ends too early"));
                }
            }
            Err(error) => return Err(broken(error)),
        }
    }
}
