//! `fs.watch`, inside a worker: inotify, one event a line.
//!
//! gVisor's queue has no limit, so the limit is here: the worker always reads, and what the host does not take
//! in time is replaced by one `overflow`.

use crate::failure::{During, Outcome};
use crate::json::Object;
use crate::poller::check;
use crate::wire::Text;
use crate::worker::Channel;
use serde::Deserialize;
use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

const PENDING_BYTES_MAX: usize = 1 << 20;
const WATCHES_MAX: usize = 16_384;
const HEADER_BYTES: usize = 16;
const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_CLOSE_WRITE
    | libc::IN_ATTRIB
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_DELETE
    | libc::IN_DELETE_SELF
    | libc::IN_DONT_FOLLOW;

#[derive(Deserialize)]
pub struct Ask {
    path: Text,
    #[serde(default)]
    recursive: bool,
}

struct Watch {
    inotify: OwnedFd,
    folders: HashMap<i32, PathBuf>,
    recursive: bool,
    pending: Vec<u8>,
    overflowed: bool,
    root: PathBuf,
    /// MOVED_FROM without its MOVED_TO yet.
    moved: Option<(u32, PathBuf, bool)>,
    /// The last `modified`, which a program repeats with every write.
    modified: Option<PathBuf>,
}

pub fn watch(ask: &Ask, channel: &mut Channel) -> Outcome<String> {
    // SAFETY: no pointers; the result is a fresh descriptor.
    let inotify =
        unsafe { OwnedFd::from_raw_fd(check(libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK))?) };
    let root = ask.path.path()?;
    let mut watch = Watch {
        inotify,
        folders: HashMap::new(),
        recursive: ask.recursive,
        pending: Vec::new(),
        overflowed: false,
        root: root.clone(),
        moved: None,
        modified: None,
    };
    watch.add(&root).during(|| root.display().to_string())?;
    if ask.recursive {
        watch.add_below(&root, false);
    }
    rustix::io::ioctl_fionbio(&*channel.output, true)?;
    channel.opened("{}");
    loop {
        watch.wait(channel);
        watch.collect();
        if !watch.send(channel) {
            return Ok("{}".into());
        }
    }
}

impl Watch {
    fn add(&mut self, path: &Path) -> std::io::Result<()> {
        if self.folders.len() >= WATCHES_MAX {
            self.overflowed = true;
            return Ok(());
        }
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: a NUL-terminated text.
        let id = check(unsafe { libc::inotify_add_watch(self.inotify.as_raw_fd(), name.as_ptr(), MASK) })?;
        self.folders.insert(id, path.to_path_buf());
        Ok(())
    }

    /// Watches every folder below; `tell`: what is found there came into being unseen.
    fn add_below(&mut self, folder: &Path, tell: bool) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for found in entries.flatten() {
            let (path, is_dir) = (found.path(), found.file_type().is_ok_and(|kind| kind.is_dir()));
            if tell {
                self.say("created", &path, None, is_dir);
            }
            // Gone or forbidden: nothing to watch.
            if is_dir && self.add(&path).is_ok() {
                self.add_below(&path, tell);
            }
        }
    }

    fn wait(&self, channel: &Channel) {
        let blocked = if self.pending.is_empty() { 0 } else { libc::POLLOUT };
        let mut ends = [
            libc::pollfd { fd: self.inotify.as_raw_fd(), events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: channel.output.as_raw_fd(), events: blocked, revents: 0 },
        ];
        // The other half of a rename follows at once, or not at all.
        let timeout = if self.moved.is_some() { 20 } else { -1 };
        // SAFETY: two pollfds.
        unsafe { libc::poll(ends.as_mut_ptr(), 2, timeout) };
    }

    fn collect(&mut self) {
        let mut buffer = [0u8; 16_384];
        let mut any = false;
        while let Ok(count) = rustix::io::read(&self.inotify, &mut buffer) {
            let mut rest = &buffer[..count];
            while let Some((header, behind)) = rest.split_first_chunk::<HEADER_BYTES>() {
                let word = |at: usize| {
                    u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
                };
                let (name, next) = behind.split_at((word(12) as usize).min(behind.len()));
                let name = name.split(|byte| *byte == 0).next().unwrap_or(b"");
                self.event(word(0) as i32, word(4), word(8), name);
                rest = next;
                any = true;
            }
        }
        if !any {
            self.forget_move();
        }
        self.modified = None;
    }

    fn event(&mut self, id: i32, mask: u32, cookie: u32, name: &[u8]) {
        if mask & libc::IN_Q_OVERFLOW != 0 {
            self.overflowed = true;
            return;
        }
        let Some(folder) = self.folders.get(&id) else { return };
        let path = if name.is_empty() { folder.clone() } else { folder.join(OsStr::from_bytes(name)) };
        let dir = mask & libc::IN_ISDIR != 0;
        let is = |flag: u32| mask & flag != 0;
        if is(libc::IN_IGNORED) {
            self.folders.remove(&id);
        } else if is(libc::IN_MOVED_TO) {
            match self.moved.take().filter(|moved| moved.0 == cookie) {
                Some((_, from, _)) => self.renamed(&from, &path, dir),
                None => self.created(&path, dir),
            }
        } else if is(libc::IN_MOVED_FROM) {
            self.forget_move();
            self.moved = Some((cookie, path, dir));
        } else if is(libc::IN_CREATE) {
            self.created(&path, dir);
        } else if is(libc::IN_DELETE) || (is(libc::IN_DELETE_SELF) && path == self.root) {
            self.say("removed", &path, None, dir);
        } else if is(libc::IN_ATTRIB) && !name.is_empty() {
            self.say("attributes", &path, None, dir);
        } else if is(libc::IN_MODIFY | libc::IN_CLOSE_WRITE) && self.modified.as_deref() != Some(&path) {
            self.say("modified", &path, None, dir);
            self.modified = Some(path);
        }
    }

    fn created(&mut self, path: &Path, dir: bool) {
        self.say("created", path, None, dir);
        if dir && self.recursive && self.add(path).is_ok() {
            self.add_below(path, true);
        }
    }

    fn renamed(&mut self, from: &Path, to: &Path, dir: bool) {
        self.say("renamed", to, Some(from), dir);
        if dir {
            // Watches follow the folder, their names do not.
            for path in self.folders.values_mut() {
                if let Ok(below) = path.strip_prefix(from) {
                    *path = if below.as_os_str().is_empty() { to.into() } else { to.join(below) };
                }
            }
        }
    }

    /// It went out of the watched tree.
    fn forget_move(&mut self) {
        if let Some((_, path, dir)) = self.moved.take() {
            self.say("removed", &path, None, dir);
        }
    }

    fn say(&mut self, kind: &str, path: &Path, from: Option<&Path>, dir: bool) {
        if self.overflowed || self.pending.len() > PENDING_BYTES_MAX {
            self.overflowed = true;
            return;
        }
        let mut event = Object::new().text("type", kind).text("path", path.as_os_str().as_bytes());
        if let Some(from) = from {
            event = event.text("from", from.as_os_str().as_bytes());
        }
        self.pending.extend_from_slice(event.flag("dir", dir).finish().as_bytes());
        self.pending.push(b'\n');
    }

    /// False: nobody reads any more.
    fn send(&mut self, channel: &mut Channel) -> bool {
        loop {
            if self.pending.is_empty() && self.overflowed {
                self.overflowed = false;
                let root = self.root.clone();
                self.say("overflow", &root, None, true);
            }
            if self.pending.is_empty() {
                return true;
            }
            match channel.output.write(&self.pending) {
                Ok(count) => drop(self.pending.drain(..count)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                Err(_) => return false,
            }
        }
    }
}
