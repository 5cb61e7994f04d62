//! Inodes: everything about a file but its names.

use crate::emit::Entry;
use crate::limits::LINK_BYTES_MAX;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome};
use crate::tar::{Kind, Time};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Scratch(u64),
    Agent,
    Hosts,
}

#[derive(Clone, Copy, Debug)]
pub struct Inode {
    pub size: u64,
    pub content: Content,
    pub mtime: Time,
    pub uid: u32,
    pub gid: u32,
    pub major: u32,
    pub minor: u32,
    pub(crate) link_at: u32,
    pub(crate) link_len: u16,
    pub mode: u16,
    pub kind: Kind,
    /// A directory that no entry named.
    pub implied: bool,
    /// A directory with overlayfs' mark.
    pub opaque: bool,
}

impl Inode {
    pub fn plain(kind: Kind, mode: u16, owner: u32) -> Self {
        Inode {
            size: 0,
            content: Content::Scratch(0),
            mtime: Time::default(),
            uid: owner,
            gid: owner,
            major: 0,
            minor: 0,
            link_at: 0,
            link_len: 0,
            mode,
            kind,
            implied: false,
            opaque: false,
        }
    }

    /// As an entry of a tar, under one of its names.
    pub fn entry<'p>(&self, path: &'p [u8], kind: Kind, link: &'p [u8], size: u64) -> Entry<'p> {
        Entry {
            path,
            kind,
            mode: u32::from(self.mode),
            uid: self.uid,
            gid: self.gid,
            size,
            mtime: self.mtime,
            link,
            major: self.major,
            minor: self.minor,
        }
    }
}

pub fn check_target(target: &[u8]) -> Outcome<()> {
    if target.is_empty() && !planted::off("link_empty") {
        return refuse(Code::BadLink, "a symbolic link to nothing");
    }
    if target.len() > LINK_BYTES_MAX && !planted::off("link_bytes") {
        return refuse(Code::NameTooLong, format!("a symbolic link of more than {LINK_BYTES_MAX} bytes"));
    }
    Ok(())
}
