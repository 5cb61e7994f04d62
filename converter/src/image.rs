//! The job `image`: layers in, one file system out.

use crate::additions;
use crate::child::Mkfs;
use crate::decompress::{hex, Packed, Unpacked};
use crate::emit;
use crate::inode::Content;
use crate::limits::{Deadline, Limits};
use crate::lock_down;
use crate::pipeline::{self, Lost, Merged, Piece, PIECES, PIECE_BYTES};
use crate::protocol::{Layer, Progress};
use crate::refusal::{refuse, Code, Outcome, Refusal};
use crate::tar::Kind;
use crate::tree::{Tree, NONE};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{channel, sync_channel, Receiver, SyncSender};

const EROFS_MAGIC: [u8; 4] = 0xe0f5_e1e2_u32.to_le_bytes();
const EROFS_MAGIC_AT: u64 = 1024;
/// Smaller content is copied: a call per file would cost more.
const SPLICE_BYTES_MIN: u64 = 64 << 10;

#[derive(Serialize)]
pub struct Done {
    root_bytes: u64,
    root_sha256: String,
    entries: u64,
    raw_bytes: u64,
    lost: Lost,
}

pub struct Files {
    pub output: File,
    pub scratch: File,
    pub agent: File,
    pub layers: Vec<File>,
}

pub fn run(files: Files, layers: &[Layer], limits: &Limits, additions: bool, mkfs: Mkfs) -> Outcome<Done> {
    let deadline = Deadline::new(limits.seconds);
    let Files { output, scratch, agent, layers: blobs } = files;
    let diff_ids: Vec<String> = layers.iter().map(|layer| layer.diff_id.clone()).collect();
    let mut merged = std::thread::scope(|scope| {
        let (pieces_in, pieces) = sync_channel(PIECES);
        let (spent, spent_out) = channel();
        let scratch = &scratch;
        let (started, is_started) = sync_channel(0);
        let merger = scope.spawn(move || {
            // What a thread does to begin is not in the filter.
            let _ = started.send(());
            pipeline::merge(limits, deadline, &diff_ids, scratch, pieces, spent)
        });
        let _ = is_started.recv();
        // The thread waits for its first piece; from here on nothing can be opened or started.
        if let Err(error) = lock_down::worker() {
            return refuse(Code::BadArchive, format!("cannot lock down: {error}"));
        }
        let unpacked = unpack(blobs, layers, limits, deadline, &pieces_in, &spent_out);
        drop(pieces_in);
        let merged = merger.join().unwrap_or_else(|_| refuse(Code::BadArchive, "the helper thread failed"));
        unpacked.and(merged)
    })?;
    if additions {
        let agent_bytes = agent.metadata().map_err(|error| Refusal::of_read(&error, "agent"))?.len();
        additions::add(&mut merged.tree, &mut merged.lost, agent_bytes)?;
    }
    write_out(&merged, &scratch, &agent, &output, mkfs, &deadline)?;
    let (root_bytes, root_sha256) = hashed(&output, &deadline)?;
    let Merged { lost, raw_bytes, entries, .. } = merged;
    Ok(Done { root_bytes, root_sha256, entries, raw_bytes, lost })
}

/// Decompresses all layers into the merger's hands. When the merger refuses, it stops listening,
/// and its refusal counts; a layer whose digest is wrong is refused for that above all.
fn unpack(
    blobs: Vec<File>,
    layers: &[Layer],
    limits: &Limits,
    deadline: Deadline,
    pieces: &SyncSender<Piece>,
    spent: &Receiver<Vec<u8>>,
) -> Outcome<()> {
    let mut raw_before = 0;
    let mut progress = Progress::default();
    for (number, (blob, layer)) in blobs.into_iter().zip(layers).enumerate() {
        let number = number as u32;
        let mut unpacked = Unpacked::new(Packed::new(blob, layer.size), layer.compression, deadline);
        let mut raw = 0;
        let result =
            unpack_layer(&mut unpacked, &mut raw, raw_before, limits, &deadline, pieces, spent, |bytes| {
                progress.tell(number, bytes);
            });
        raw_before += raw;
        let whole = match result {
            Err(Refusal { code: Code::TooLarge | Code::Ratio | Code::NoSpace, .. }) => Ok(()),
            _ => unpacked.packed.verify(&layer.digest),
        };
        if !whole.and(result).map_err(|refusal| refusal.in_layer(number))? {
            return Ok(());
        }
    }
    Ok(())
}

/// False when the merger stopped listening.
#[allow(clippy::too_many_arguments)]
fn unpack_layer(
    unpacked: &mut Unpacked,
    raw: &mut u64,
    raw_before: u64,
    limits: &Limits,
    deadline: &Deadline,
    pieces: &SyncSender<Piece>,
    spent: &Receiver<Vec<u8>>,
    mut progress: impl FnMut(u64),
) -> Outcome<bool> {
    loop {
        let mut piece = spent.try_recv().unwrap_or_else(|_| vec![0; PIECE_BYTES]);
        let count = unpacked.read(&mut piece)?;
        if count == 0 {
            return Ok(pieces.send(Piece::LayerEnd).is_ok());
        }
        *raw += count as u64;
        deadline.check()?;
        limits.check_raw(raw_before + *raw)?;
        limits.check_ratio(*raw, unpacked.packed.read)?;
        progress(unpacked.packed.read);
        if pieces.send(Piece::Data(piece, count)).is_err() {
            return Ok(false);
        }
    }
}

fn write_out(
    merged: &Merged,
    scratch: &File,
    agent: &File,
    output: &File,
    mkfs: Mkfs,
    deadline: &Deadline,
) -> Outcome<()> {
    let order = merged.tree.ordered()?;
    let mut stream = BufWriter::with_capacity(256 << 10, &mkfs.input);
    let written = write_tree(&merged.tree, &order, scratch, agent, &mut stream, deadline);
    let flushed = stream.flush();
    drop(stream);
    let succeeded = mkfs.finish().map_err(|error| Refusal::of_read(&error, "state of mkfs.erofs"))?;
    // When it dies, our writes fail: its end is the cause.
    if !succeeded {
        return match written {
            Err(refusal @ Refusal { code: Code::TooLarge, .. }) => Err(refusal),
            _ if is_full(output) => refuse(Code::NoSpace, "no space left for the root file system"),
            _ => refuse(Code::MkfsFailed, "mkfs.erofs could not make the file system"),
        };
    }
    written?;
    flushed.map_err(|error| Refusal::of_write(&error, "stream to mkfs.erofs"))
}

fn write_tree(
    tree: &Tree,
    order: &[u32],
    scratch: &File,
    agent: &File,
    stream: &mut BufWriter<&File>,
    deadline: &Deadline,
) -> Outcome<()> {
    let mut first_names = vec![NONE; tree.inodes()];
    for (count, &node) in order.iter().enumerate() {
        if count % 256 == 0 {
            deadline.check()?;
        }
        let number = tree.inode_of(node);
        let inode = tree.inode(number);
        let path = tree.path(node);
        let first = &mut first_names[number as usize];
        if *first != NONE {
            let target = tree.path(*first);
            let entry = inode.entry(&path, Kind::HardLink, &target, 0);
            emit::write_all(stream, &emit::header(&entry), "stream to mkfs.erofs")?;
            continue;
        }
        *first = node;
        let entry = inode.entry(&path, inode.kind, tree.link(inode), inode.size);
        emit::write_all(stream, &emit::header(&entry), "stream to mkfs.erofs")?;
        if inode.kind == Kind::File && inode.size > 0 {
            let copied = match inode.content {
                Content::Scratch(at) => copy(scratch, at, inode.size, stream, deadline)?,
                Content::Agent => copy(agent, 0, inode.size, stream, deadline)?,
                Content::Hosts => stream.write_all(additions::HOSTS),
            };
            copied
                .and_then(|()| emit::pad(stream, inode.size))
                .map_err(|error| Refusal::of_write(&error, "stream to mkfs.erofs"))?;
        }
    }
    emit::end(stream).map_err(|error| Refusal::of_write(&error, "stream to mkfs.erofs"))
}

/// Content from a file into the pipe; large content without passing through our memory.
fn copy(
    from: &File,
    at: u64,
    size: u64,
    stream: &mut BufWriter<&File>,
    deadline: &Deadline,
) -> Outcome<io::Result<()>> {
    if size < SPLICE_BYTES_MIN {
        let mut buffer = [0u8; SPLICE_BYTES_MIN as usize];
        let content = &mut buffer[..size as usize];
        return Ok(from.read_exact_at(content, at).and_then(|()| stream.write_all(content)));
    }
    if let Err(error) = stream.flush() {
        return Ok(Err(error));
    }
    let (mut position, end) = (at as i64, (at + size) as i64);
    while position < end {
        deadline.check()?;
        let count = (end - position).min(1 << 20) as usize;
        // SAFETY: both descriptors are live, and the kernel updates the offset it is given.
        let moved = unsafe {
            libc::splice(
                from.as_raw_fd(),
                &mut position,
                stream.get_ref().as_raw_fd(),
                std::ptr::null_mut(),
                count,
                libc::SPLICE_F_MORE,
            )
        };
        match moved {
            0 => return Ok(Err(io::ErrorKind::UnexpectedEof.into())),
            moved if moved < 0 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Ok(Err(error));
                }
            }
            _ => {}
        }
    }
    Ok(Ok(()))
}

fn is_full(file: &File) -> bool {
    // SAFETY: an all-zero struct is a valid one, and the call fills it.
    unsafe {
        let mut found: libc::statfs = std::mem::zeroed();
        libc::fstatfs(file.as_raw_fd(), &mut found) == 0 && found.f_bavail < 16
    }
}

/// The size and hash of what mkfs.erofs wrote, if it looks like what it should be.
fn hashed(output: &File, deadline: &Deadline) -> Outcome<(u64, String)> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut position = 0;
    loop {
        deadline.check()?;
        match output
            .read_at(&mut buffer, position)
            .map_err(|error| Refusal::of_read(&error, "root file system"))?
        {
            0 => break,
            count => {
                hasher.update(&buffer[..count]);
                position += count as u64;
            }
        }
    }
    let mut magic = [0u8; 4];
    match output.read_exact_at(&mut magic, EROFS_MAGIC_AT) {
        Ok(()) if magic == EROFS_MAGIC => Ok((position, hex(&hasher.finalize()))),
        _ => refuse(Code::MkfsFailed, "mkfs.erofs made no file system"),
    }
}
