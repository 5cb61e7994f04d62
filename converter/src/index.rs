//! The job `index`: what a plain tar holds, one line of JSON for each entry.
//!
//! A name that is not UTF-8 cannot be in JSON, and is refused.

use crate::decompress::hex;
use crate::limits::{Deadline, Limits};
use crate::lock_down;
use crate::paths;
use crate::refusal::{refuse, Code, Outcome, Refusal};
use crate::source::Seekable;
use crate::tar::{Header, Kind, Reader};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write};

#[derive(Serialize)]
pub struct Done {
    entries: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Line<'a> {
    path: &'a str,
    r#type: &'static str,
    mode: u32,
    uid: u32,
    gid: u32,
    mtime: f64,
    size: u64,
    offset: u64,
    link: Option<&'a str>,
    sha256: Option<String>,
}

pub fn run(output: &File, input: File, hash: bool, limits: &Limits) -> Outcome<Done> {
    let deadline = Deadline::new(limits.seconds);
    if let Err(error) = lock_down::worker() {
        return refuse(Code::BadArchive, format!("cannot lock down: {error}"));
    }
    let source = Seekable::new(input).map_err(|error| Refusal::of_read(&error, "archive"))?;
    let mut reader = Reader::new(source, limits);
    let mut lines = BufWriter::with_capacity(64 << 10, output);
    let mut entries = 0;
    while let Some(header) = reader.next(0)? {
        deadline.check()?;
        write_line(&mut reader, &header, hash, limits, &deadline, &mut lines)
            .map_err(|refusal| refusal.at(&header.name))?;
        entries += 1;
    }
    lines.flush().map_err(|error| Refusal::of_write(&error, "index"))?;
    Ok(Done { entries, bytes: reader.position() })
}

fn write_line(
    reader: &mut Reader<Seekable<File>>,
    header: &Header,
    hash: bool,
    limits: &Limits,
    deadline: &Deadline,
    lines: &mut impl Write,
) -> Outcome<()> {
    let path = paths::normalised(&header.name, limits)?;
    if path.is_empty() && header.kind != Kind::Folder {
        return refuse(Code::BadName, "the root is not a directory");
    }
    let link = link_of(header, limits)?;
    let sha256 = match header.kind {
        Kind::File if hash => Some(hashed(reader, deadline)?),
        _ => None,
    };
    let line = Line {
        path: text(&path)?,
        r#type: word(header.kind),
        mode: header.mode,
        uid: header.uid,
        gid: header.gid,
        mtime: header.mtime.seconds as f64 + f64::from(header.mtime.nanos) / 1e9,
        size: header.size,
        offset: header.offset,
        link: link.as_deref().map(text).transpose()?,
        sha256,
    };
    let mut bytes = serde_json::to_vec(&line).expect("our own lines can be written as JSON");
    bytes.push(b'\n');
    lines.write_all(&bytes).map_err(|error| Refusal::of_write(&error, "index"))
}

fn link_of(header: &Header, limits: &Limits) -> Outcome<Option<Vec<u8>>> {
    match header.kind {
        Kind::Symlink => {
            crate::inode::check_target(&header.link)?;
            Ok(Some(header.link.clone()))
        }
        Kind::HardLink => match paths::normalised(&header.link, limits) {
            Ok(target) if !target.is_empty() => Ok(Some(target)),
            Ok(_) => refuse(Code::BadLink, "a hard link to nothing"),
            Err(refusal) => refuse(Code::BadLink, format!("a hard link's target has {}", refusal.message)),
        },
        _ => Ok(None),
    }
}

fn text(bytes: &[u8]) -> Outcome<&str> {
    std::str::from_utf8(bytes).or_else(|_| refuse(Code::BadName, "a name that is not UTF-8"))
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::HardLink => "hardlink",
        Kind::Symlink => "symlink",
        Kind::Char => "char",
        Kind::Block => "block",
        Kind::Folder => "dir",
        Kind::Fifo => "fifo",
    }
}

fn hashed(reader: &mut Reader<Seekable<File>>, deadline: &Deadline) -> Outcome<String> {
    let mut hasher = Sha256::new();
    let mut buffer = [0u8; 64 << 10];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
        deadline.check()?;
    }
}
