//! The job `upper`: the writable layer of a sandbox, as runsc writes it, becomes an OCI layer.
//!
//! runsc marks as overlayfs does: a character device 0:0 is a whiteout (further ones are hard
//! links to the first), and `trusted.overlay.opaque` an opaque directory. Every directory that
//! was made in the layer has that mark; written as `.wh..wh..opq` it hides nothing and is right.
//! A guest's own file called `.wh.x` would turn into a whiteout, and is refused.

use crate::decompress::{digest_text, Compression};
use crate::emit;
use crate::inode::{Content, Inode};
use crate::limits::{Deadline, Limits};
use crate::lock_down;
use crate::paths;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome, Refusal};
use crate::source::Seekable;
use crate::tar::{Kind, Reader, Time};
use crate::tree::{Tree, NONE, ROOT};
use flate2::write::GzEncoder;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

/// What comes through a pipe is kept in memory; a file has no such limit.
const SPOOL_BYTES_MAX: u64 = 512 << 20;
/// Speed: the layer is read back on this machine first.
const GZIP_LEVEL: u32 = 2;
const STAMP: u8 = 1;

#[derive(Serialize)]
pub struct Done {
    digest: String,
    size: u64,
    diff_id: String,
    raw_bytes: u64,
    entries: u64,
}

/// Memory for what comes through a pipe; made before files can no longer be.
pub fn spool() -> io::Result<File> {
    // SAFETY: the name is a C string, and the descriptor is new and ours.
    unsafe {
        match libc::memfd_create(c"upper".as_ptr(), libc::MFD_CLOEXEC) {
            -1 => Err(io::Error::last_os_error()),
            descriptor => Ok(File::from_raw_fd(descriptor)),
        }
    }
}

pub fn run(
    output: &File,
    input: File,
    spool: File,
    compression: Compression,
    drop: &[String],
    limits: &Limits,
) -> Outcome<Done> {
    let deadline = Deadline::new(limits.seconds);
    if let Err(error) = lock_down::worker() {
        return refuse(Code::BadArchive, format!("cannot lock down: {error}"));
    }
    let input = seekable(input, spool, &deadline)?;
    let tree = read(&input, drop, limits, &deadline)?;
    let mut packer = Packer::new(output, compression);
    let entries = write(&tree, &input, &mut packer, &deadline)?;
    packer.finish(entries)
}

fn seekable(mut input: File, mut spool: File, deadline: &Deadline) -> Outcome<File> {
    if input.metadata().map_err(|error| Refusal::of_read(&error, "layer"))?.is_file() {
        return Ok(input);
    }
    let mut buffer = vec![0u8; 256 << 10];
    let mut spooled = 0;
    loop {
        deadline.check()?;
        let count = input.read(&mut buffer).map_err(|error| Refusal::of_read(&error, "layer"))?;
        if count == 0 {
            return Ok(spool);
        }
        spooled += count as u64;
        if spooled > SPOOL_BYTES_MAX && !planted::off("spool_bytes") {
            return refuse(Code::TooLarge, format!("more than {SPOOL_BYTES_MAX} bytes through a pipe"));
        }
        spool.write_all(&buffer[..count]).map_err(|error| Refusal::of_write(&error, "layer"))?;
    }
}

fn read<'a>(input: &File, drop: &[String], limits: &'a Limits, deadline: &Deadline) -> Outcome<Tree<'a>> {
    let mut tree = Tree::new(limits);
    let source = Seekable::new(input).map_err(|error| Refusal::of_read(&error, "layer"))?;
    let mut reader = Reader::new(source, limits);
    while let Some(header) = reader.next(0)? {
        deadline.check()?;
        paths::normalised(&header.name, limits)
            .and_then(|path| {
                check_name(&path)?;
                tree.insert(&path, &header, header.offset, STAMP)
            })
            .map_err(|refusal| refusal.at(&header.name))?;
    }
    limits.check_raw(reader.position())?;
    for path in drop {
        let path = paths::normalised(path.as_bytes(), limits)?;
        let (folder, name) = paths::split(&path);
        if let Some(parent) = tree.walk(folder, None)? {
            if let Some(node) = tree.child(parent, name) {
                tree.remove(node);
            }
        }
    }
    Ok(tree)
}

fn check_name(path: &[u8]) -> Outcome<()> {
    if path.split(|&byte| byte == b'/').any(|part| part.starts_with(b".wh.")) && !planted::off("upper_names")
    {
        return refuse(Code::BadName, "a layer cannot hold a name that begins with `.wh.`");
    }
    Ok(())
}

fn is_whiteout(inode: &Inode) -> bool {
    inode.kind == Kind::Char && inode.major == 0 && inode.minor == 0
}

fn mark(path: &[u8]) -> emit::Entry<'_> {
    emit::Entry {
        path,
        kind: Kind::File,
        mode: 0o644,
        uid: 0,
        gid: 0,
        size: 0,
        mtime: Time::default(),
        link: b"",
        major: 0,
        minor: 0,
    }
}

fn write(tree: &Tree, input: &File, packer: &mut Packer, deadline: &Deadline) -> Outcome<u64> {
    let mut first_names = vec![NONE; tree.inodes()];
    let mut entries = 0;
    for node in tree.ordered()? {
        deadline.check()?;
        let number = tree.inode_of(node);
        let inode = tree.inode(number);
        // What the layer did not name, it did not change.
        if node == ROOT || inode.implied {
            continue;
        }
        let path = tree.path(node);
        entries += 1;
        if is_whiteout(inode) {
            let (folder, name) = paths::split(&path);
            paths::check_part(&[b".wh.", name].concat(), tree.limits())
                .map_err(|refusal| refusal.at(&path))?;
            let slash: &[u8] = if folder.is_empty() { b"" } else { b"/" };
            packer.put(&emit::header(&mark(&[folder, slash, b".wh.", name].concat())))?;
            continue;
        }
        let first = &mut first_names[number as usize];
        if *first != NONE {
            let target = tree.path(*first);
            packer.put(&emit::header(&inode.entry(&path, Kind::HardLink, &target, 0)))?;
            continue;
        }
        *first = node;
        packer.put(&emit::header(&inode.entry(&path, inode.kind, tree.link(inode), inode.size)))?;
        if inode.kind == Kind::File {
            copy(input, inode, packer, deadline)?;
        } else if inode.opaque && inode.kind == Kind::Folder {
            entries += 1;
            packer.put(&emit::header(&mark(&[&path[..], b"/.wh..wh..opq"].concat())))?;
        }
    }
    packer.put(&[0; 1024])?;
    Ok(entries)
}

fn copy(input: &File, inode: &Inode, packer: &mut Packer, deadline: &Deadline) -> Outcome<()> {
    let Content::Scratch(mut at) = inode.content else { return Ok(()) };
    let end = at + inode.size;
    let mut buffer = [0u8; 64 << 10];
    while at < end {
        deadline.check()?;
        let count = buffer.len().min((end - at) as usize);
        input.read_exact_at(&mut buffer[..count], at).map_err(|error| Refusal::of_read(&error, "layer"))?;
        packer.put(&buffer[..count])?;
        at += count as u64;
    }
    packer.put(&[0; 512][..crate::tar::padding(inode.size) as usize])
}

/// Hashes what goes through it on the way to the file.
struct Hashed<'f> {
    file: &'f File,
    hasher: Sha256,
    size: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write_all_at(bytes, self.size)?;
        self.hasher.update(bytes);
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

enum Sink<'f> {
    Gzip(Box<GzEncoder<BufWriter<Hashed<'f>>>>),
    Plain(BufWriter<Hashed<'f>>),
}

/// The layer being written: raw bytes in, both digests out.
struct Packer<'f> {
    sink: Sink<'f>,
    raw: Sha256,
    raw_bytes: u64,
}

impl<'f> Packer<'f> {
    fn new(file: &'f File, compression: Compression) -> Self {
        let hashed = Hashed { file, hasher: Sha256::new(), size: 0 };
        let buffered = BufWriter::with_capacity(256 << 10, hashed);
        let sink = match compression {
            Compression::None => Sink::Plain(buffered),
            _ => Sink::Gzip(Box::new(GzEncoder::new(buffered, flate2::Compression::new(GZIP_LEVEL)))),
        };
        Packer { sink, raw: Sha256::new(), raw_bytes: 0 }
    }

    fn put(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.raw.update(bytes);
        self.raw_bytes += bytes.len() as u64;
        let written = match &mut self.sink {
            Sink::Gzip(sink) => sink.write_all(bytes),
            Sink::Plain(sink) => sink.write_all(bytes),
        };
        written.map_err(|error| Refusal::of_write(&error, "layer"))
    }

    fn finish(self, entries: u64) -> Outcome<Done> {
        let failed = |error: io::Error| Refusal::of_write(&error, "layer");
        let buffered = match self.sink {
            Sink::Gzip(sink) => sink.finish().map_err(failed)?,
            Sink::Plain(sink) => sink,
        };
        let hashed = buffered.into_inner().map_err(|error| failed(error.into_error()))?;
        Ok(Done {
            size: hashed.size,
            digest: digest_text(hashed.hasher),
            diff_id: digest_text(self.raw),
            raw_bytes: self.raw_bytes,
            entries,
        })
    }
}
