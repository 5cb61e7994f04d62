//! The helper thread of the job `image`: gets decompressed layers in pieces, writes them to the
//! scratch file, hashes them, and merges their entries into the tree.

use crate::decompress::digest_text;
use crate::limits::{Deadline, Limits};
use crate::paths;
use crate::planted;
use crate::refusal::{escaped, refuse, Code, Outcome, Refusal};
use crate::source::Source;
use crate::tar::{Header, Reader};
use crate::tree::Tree;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender};

pub const PIECE_BYTES: usize = 1 << 20;
pub const PIECES: usize = 6;
const LOST_EXAMPLES_MAX: usize = 20;
const DEADLINE_EVERY: u64 = 256;

pub enum Piece {
    Data(Vec<u8>, usize),
    LayerEnd,
}

/// What the file system cannot hold or must not.
#[derive(Default, Serialize)]
pub struct Lost {
    pub xattrs: u64,
    pub xattr_examples: Vec<String>,
    pub sockets: u64,
    pub devices: u64,
    pub reserved: u64,
    pub replaced: u64,
}

pub struct Merged<'a> {
    pub tree: Tree<'a>,
    pub lost: Lost,
    pub raw_bytes: u64,
    pub entries: u64,
}

/// One layer's raw bytes as the tar reader sees them.
struct LayerBytes<'p> {
    pieces: &'p Receiver<Piece>,
    spent: &'p Sender<Vec<u8>>,
    scratch: &'p File,
    written: &'p mut u64,
    hasher: &'p mut Sha256,
    piece: Vec<u8>,
    at: usize,
    end: usize,
    ended: bool,
}

impl Source for LayerBytes<'_> {
    fn fill(&mut self) -> io::Result<&[u8]> {
        while self.at == self.end && !self.ended {
            match self.pieces.recv() {
                Ok(Piece::Data(piece, length)) => {
                    self.hasher.update(&piece[..length]);
                    self.scratch.write_all_at(&piece[..length], *self.written)?;
                    *self.written += length as u64;
                    // The other side may be gone: then nobody needs the buffer.
                    let _ = self.spent.send(std::mem::replace(&mut self.piece, piece));
                    (self.at, self.end) = (0, length);
                }
                Ok(Piece::LayerEnd) => self.ended = true,
                Err(_) => return Err(io::Error::other("the decompressor stopped")),
            }
        }
        Ok(&self.piece[self.at..self.end])
    }

    fn consume(&mut self, count: usize) {
        self.at += count;
    }
}

/// Merges all layers, lowest first. A write that fails has its own meaning, so it is kept apart.
pub fn merge<'a>(
    limits: &'a Limits,
    deadline: Deadline,
    diff_ids: &[String],
    scratch: &File,
    pieces: Receiver<Piece>,
    spent: Sender<Vec<u8>>,
) -> Outcome<Merged<'a>> {
    let mut merged = Merged { tree: Tree::new(limits), lost: Lost::default(), raw_bytes: 0, entries: 0 };
    for (layer, diff_id) in diff_ids.iter().enumerate() {
        let mut hasher = Sha256::new();
        let layer = layer as u32;
        let base = merged.raw_bytes;
        let mut written = base;
        let bytes = LayerBytes {
            pieces: &pieces,
            spent: &spent,
            scratch,
            written: &mut written,
            hasher: &mut hasher,
            piece: vec![0; PIECE_BYTES],
            at: 0,
            end: 0,
            ended: false,
        };
        let mut reader = Reader::new(bytes, limits);
        let result = merge_layer(&mut reader, &mut merged, base, layer, &deadline);
        merged.entries += reader.entries;
        drop(reader);
        merged.raw_bytes = written;
        result.map_err(|refusal| refusal.in_layer(layer))?;
        if &digest_text(hasher) != diff_id && !planted::off("diff_id") {
            return Err(Refusal::new(Code::BadDigest, "the unpacked layer's digest (diff_id) is another")
                .in_layer(layer));
        }
    }
    Ok(merged)
}

fn merge_layer(
    reader: &mut Reader<LayerBytes>,
    merged: &mut Merged,
    base: u64,
    layer: u32,
    deadline: &Deadline,
) -> Outcome<()> {
    while let Some(header) = reader.next(merged.entries)? {
        if reader.entries.is_multiple_of(DEADLINE_EVERY) {
            deadline.check()?;
        }
        planted::unpack(&header);
        merge_entry(merged, &header, base, layer).map_err(|refusal| refusal.at(&header.name))?;
    }
    if planted::off("drain") {
        return Ok(());
    }
    reader.drain()
}

fn merge_entry(merged: &mut Merged, header: &Header, base: u64, layer: u32) -> Outcome<()> {
    let stamp = layer as u8 + 1;
    let tree = &mut merged.tree;
    let path = paths::normalised(&header.name, tree.limits())?;
    let (folder, name) = paths::split(&path);
    match whiteout(folder, name)? {
        Whiteout::Not => {}
        Whiteout::Opaque => return tree.opaque(folder, stamp),
        Whiteout::Of(hidden) => {
            let hidden = [folder, if folder.is_empty() { b"" } else { b"/" }, hidden].concat();
            return tree.whiteout(&hidden, stamp);
        }
        Whiteout::Ignored => return Ok(()),
    }
    for name in &header.xattrs {
        merged.lost.xattrs += 1;
        if merged.lost.xattr_examples.len() < LOST_EXAMPLES_MAX || planted::off("lost_examples") {
            merged.lost.xattr_examples.push(format!("{}: {}", escaped(&path), escaped(name)));
        }
    }
    tree.insert(&path, header, base + header.offset, stamp)
}

#[derive(Debug, PartialEq, Eq)]
pub enum Whiteout<'n> {
    Not,
    Opaque,
    Of(&'n [u8]),
    /// aufs' own files, which old Docker layers carry.
    Ignored,
}

/// What a name hides. A whiteout is never a directory, and never hides `.`, `..` or nothing.
pub fn whiteout<'n>(folder: &[u8], name: &'n [u8]) -> Outcome<Whiteout<'n>> {
    if planted::off("whiteout_names") {
        return Ok(Whiteout::Not);
    }
    for part in folder.split(|&byte| byte == b'/') {
        if part.starts_with(b".wh..wh.") {
            return Ok(Whiteout::Ignored);
        }
        if part.starts_with(b".wh.") {
            return refuse(Code::BadName, "something below a whiteout");
        }
    }
    match name.strip_prefix(b".wh.") {
        None => Ok(Whiteout::Not),
        Some(b"" | b"." | b"..") => refuse(Code::BadName, "a whiteout of nothing"),
        Some(b".wh..opq") => Ok(Whiteout::Opaque),
        Some(hidden) if hidden.starts_with(b".wh.") => Ok(Whiteout::Ignored),
        Some(hidden) => Ok(Whiteout::Of(hidden)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whiteout_names() {
        assert_eq!(whiteout(b"a", b"b").unwrap(), Whiteout::Not);
        assert_eq!(whiteout(b"a", b".wh.b").unwrap(), Whiteout::Of(b"b"));
        assert_eq!(whiteout(b"", b".wh..wh..opq").unwrap(), Whiteout::Opaque);
        assert_eq!(whiteout(b"", b".wh..wh.plnk").unwrap(), Whiteout::Ignored);
        assert_eq!(whiteout(b".wh..wh.plnk", b"1.2").unwrap(), Whiteout::Ignored);
        for name in [&b".wh."[..], b".wh..", b".wh..."] {
            assert_eq!(whiteout(b"", name).unwrap_err().code, Code::BadName);
        }
        assert_eq!(whiteout(b".wh.a", b"b").unwrap_err().code, Code::BadName);
    }
}
