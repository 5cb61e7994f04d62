//! `tree.write`, inside a worker: a tar stream becomes files below a folder, and nowhere else.
//!
//! Every name is walked from the folder's descriptor, one part at a time and never through a link, so that
//! neither `..` nor a link in the archive or in the tree leads out.

use crate::failure::{During, Failure, Outcome};
use crate::tar::{padding, read_header, Header, Kind};
use crate::tree_read::Errors;
use crate::wire::Text;
use crate::worker::Channel;
use rustix::fs::{self as rfs, AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;
use serde::Deserialize;
use std::io::{BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

const BUFFER_BYTES: usize = 262_144;
const PARTS_MAX: usize = 512;
/// PATH, because gVisor (release-20260905) follows a link that is opened with DIRECTORY | NOFOLLOW alone.
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

#[derive(Deserialize)]
pub struct Ask {
    path: Text,
    #[serde(default)]
    overwrite: bool,
    /// Owners are the archive's numbers, and a folder that is there gets owner and mode too.
    #[serde(default)]
    owners: bool,
}

struct Unpack {
    root: OwnedFd,
    overwrite: bool,
    owners: bool,
    /// The last folder used: archives keep a folder's files together.
    recent: Option<(Vec<u8>, OwnedFd)>,
    /// Modes that would have kept us from filling the folder, for the end.
    later: Vec<(Vec<u8>, u32)>,
    buffer: Vec<u8>,
}

pub fn write(ask: &Ask, channel: &mut Channel) -> Outcome<String> {
    let path = ask.path.path()?;
    let what = || path.display().to_string();
    std::fs::create_dir_all(&path).during(what)?;
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY;
    let root = rfs::open(&path, flags, Mode::empty()).during(what)?;
    // Modes are the archive's.
    rustix::process::umask(Mode::empty());
    channel.opened("{}");
    let mut unpack = Unpack {
        root,
        overwrite: ask.overwrite,
        owners: ask.owners,
        recent: None,
        later: Vec::new(),
        buffer: vec![0; BUFFER_BYTES],
    };
    let mut input = BufReader::with_capacity(BUFFER_BYTES, &*channel.input);
    let (mut errors, mut files) = (Errors::default(), 0);
    while let Some(header) = read_header(&mut input)? {
        let mut content = (&mut input).take(header.size);
        match unpack.entry(&header, &mut content) {
            Ok(true) => files += 1,
            Ok(false) => {}
            Err(failure) => errors.add(&header.name, &failure),
        }
        let rest = content.limit() + padding(header.size) as u64;
        let skipped = std::io::copy(&mut (&mut input).take(rest), &mut std::io::sink())?;
        if skipped < rest {
            return Err(Failure::invalid("tar: cut short"));
        }
    }
    unpack.set_modes();
    // A writer that pads its archive must not be cut off.
    std::io::copy(&mut input, &mut std::io::sink())?;
    Ok(errors.end(files))
}

/// The parts of a name; `.` and empty ones are nothing, `..` and a leading slash are refused.
fn parts(name: &[u8]) -> Outcome<Vec<&[u8]>> {
    if name.starts_with(b"/") {
        return Err(Failure::invalid("an absolute name"));
    }
    let parts: Vec<&[u8]> =
        name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(Failure::invalid("a name with '..'"));
    }
    if parts.len() > PARTS_MAX {
        return Err(Failure::new("name_too_long", "more than 512 parts"));
    }
    Ok(parts)
}

impl Unpack {
    /// The folder that holds the entry, made if it is missing, and the entry's own name.
    fn place<'a>(&mut self, name: &'a [u8]) -> Outcome<Option<(OwnedFd, &'a [u8])>> {
        let mut parts = parts(name)?;
        let Some(last) = parts.pop() else { return Ok(None) };
        let key = parts.join(&b'/');
        if let Some((known, fd)) = &self.recent {
            if *known == key {
                return Ok(Some((fd.try_clone()?, last)));
            }
        }
        let mut folder = self.root.try_clone()?;
        for part in parts {
            folder = open_folder(folder.as_fd(), part)?;
        }
        self.recent = Some((key, folder.try_clone()?));
        Ok(Some((folder, last)))
    }

    /// False: the entry is the root itself.
    fn entry(&mut self, header: &Header, content: &mut impl Read) -> Outcome<bool> {
        let Some((folder, name)) = self.place(&header.name)? else { return Ok(false) };
        let folder = folder.as_fd();
        match header.kind {
            Kind::Folder => self.folder(folder, name, header)?,
            Kind::File => self.file(folder, name, header, content)?,
            Kind::Symlink => {
                self.fresh(folder, name, || rfs::symlinkat(&header.link[..], folder, name))?;
                self.own(folder, name, header)?;
            }
            Kind::HardLink => {
                let Some((from, old)) = self.place(&header.link)? else {
                    return Err(Failure::invalid("a link to the root"));
                };
                self.fresh(folder, name, || rfs::linkat(from.as_fd(), old, folder, name, AtFlags::empty()))?;
            }
            Kind::Fifo => {
                let mode = Mode::from_raw_mode(header.mode);
                self.fresh(folder, name, || rfs::mknodat(folder, name, rfs::FileType::Fifo, mode, 0))?;
                self.own(folder, name, header)?;
            }
            Kind::Other(byte) => {
                return Err(Failure::new("unsupported", format!("tar entry of type {byte:#x}")));
            }
        }
        Ok(true)
    }

    /// Makes what must not exist yet; with `overwrite`, what is there and no folder gives way.
    fn fresh<T>(
        &self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        make: impl Fn() -> rustix::io::Result<T>,
    ) -> Outcome<T> {
        match make() {
            Err(Errno::EXIST) if self.overwrite => {
                rfs::unlinkat(folder, name, AtFlags::empty())?;
                Ok(make()?)
            }
            other => Ok(other?),
        }
    }

    fn folder(&mut self, parent: BorrowedFd<'_>, name: &[u8], header: &Header) -> Outcome<()> {
        match rfs::mkdirat(parent, name, Mode::from_raw_mode(header.mode | 0o700)) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let old = rfs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if rfs::FileType::from_raw_mode(old.st_mode) == rfs::FileType::Directory {
                    return self.own_folder(parent, name, header);
                }
                self.fresh(parent, name, || {
                    rfs::mkdirat(parent, name, Mode::from_raw_mode(header.mode | 0o700))
                })?;
            }
            Err(error) => return Err(error.into()),
        }
        self.own_folder(parent, name, header)?;
        if header.mode & 0o700 != 0o700 {
            self.later.push((header.name.clone(), header.mode));
        }
        Ok(())
    }

    /// The archive's owner, where owners are asked for; never through a link.
    fn own(&self, folder: BorrowedFd<'_>, name: &[u8], header: &Header) -> Outcome<()> {
        if self.owners {
            let (uid, gid) = owner(header)?;
            rfs::chownat(folder, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// The mode after the owner: a change of owner takes bits away.
    fn own_folder(&self, folder: BorrowedFd<'_>, name: &[u8], header: &Header) -> Outcome<()> {
        self.own(folder, name, header)?;
        if self.owners {
            rfs::chmodat(folder, name, Mode::from_raw_mode(header.mode | 0o700), AtFlags::empty())?;
        }
        Ok(())
    }

    fn file(
        &mut self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        header: &Header,
        content: &mut impl Read,
    ) -> Outcome<()> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(header.mode & 0o777);
        let fd = self.fresh(folder, name, || rfs::openat(folder, name, flags, mode))?;
        loop {
            let count = content.read(&mut self.buffer)?;
            if count == 0 {
                break;
            }
            write_all(fd.as_fd(), &self.buffer[..count])?;
        }
        if self.owners {
            let (uid, gid) = owner(header)?;
            rfs::fchown(&fd, Some(uid), Some(gid))?;
        }
        if header.mode & 0o7000 != 0 {
            rfs::fchmod(&fd, Mode::from_raw_mode(header.mode))?;
        }
        let time = Timespec { tv_sec: header.mtime, tv_nsec: 0 };
        // The time of a file is not worth its content.
        let _ = rfs::futimens(&fd, &Timestamps { last_access: time, last_modification: time });
        Ok(())
    }

    fn set_modes(&mut self) {
        for (name, mode) in std::mem::take(&mut self.later).into_iter().rev() {
            if let Ok(Some((folder, last))) = self.place(&name) {
                let read = OFlags::DIRECTORY | OFlags::CLOEXEC;
                let found = rfs::openat(&folder, last, FOLDER, Mode::empty());
                // Of the folder itself now: a PATH descriptor has no mode to change.
                if let Ok(fd) = found.and_then(|found| rfs::openat(found, ".", read, Mode::empty())) {
                    // It was just made by us; a command that changed it meanwhile has the last word.
                    let _ = rfs::fchmod(&fd, Mode::from_raw_mode(mode));
                }
            }
        }
    }
}

fn owner(header: &Header) -> Outcome<(Uid, Gid)> {
    // To the kernel this number says "leave it".
    if header.uid == u32::MAX || header.gid == u32::MAX {
        return Err(Failure::invalid("an owner that is no number of a user"));
    }
    Ok((Uid::from_raw(header.uid), Gid::from_raw(header.gid)))
}

fn open_folder(parent: BorrowedFd<'_>, name: &[u8]) -> Outcome<OwnedFd> {
    match rfs::openat(parent, name, FOLDER, Mode::empty()) {
        Err(Errno::NOENT) => {
            rfs::mkdirat(parent, name, Mode::from_raw_mode(0o755))?;
            Ok(rfs::openat(parent, name, FOLDER, Mode::empty())?)
        }
        other => Ok(other?),
    }
}

fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> Outcome<()> {
    while !bytes.is_empty() {
        let count = rustix::io::write(fd, bytes)?;
        bytes = &bytes[count..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_below() {
        assert_eq!(parts(b"./a//b/.").expect("plain"), [b"a", b"b"]);
        for bad in [&b"/a"[..], b"..", b"a/../b", b"a/.."] {
            assert_eq!(parts(bad).expect_err("refused").code, "invalid");
        }
        assert!(parts(b"").expect("the root").is_empty());
    }
}
