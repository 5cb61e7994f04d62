//! What every root needs besides what the image has (see tools/rootfs/pack.sh).
//!
//! `/.cloche` belongs to us: what an image has there is dropped. So is the content of `/dev`,
//! over which the sandbox mounts its own. `/proc`, `/sys`, `/dev`, `/tmp`, `/run` and `/workspace` are
//! mounted over or written to by the agent, so a file or a link there becomes a directory.

use crate::inode::{Content, Inode};
use crate::pipeline::Lost;
use crate::planted;
use crate::refusal::Outcome;
use crate::tar::Kind;
use crate::tree::{Tree, NONE, ROOT};

const AGENT: u32 = 64000;
const USER: u32 = 1000;
pub const HOSTS: &[u8] = b"127.0.0.1 localhost\n::1 localhost\n";
/// Above every layer's, which are at most 128.
const STAMP: u8 = u8::MAX;

pub fn add(tree: &mut Tree, lost: &mut Lost, agent_bytes: u64) -> Outcome<()> {
    if let Some(node) = tree.child(ROOT, b".cloche") {
        if !planted::off("reserved") {
            lost.reserved += 1 + descendants(tree, node, |_| true);
            tree.remove(node);
        }
    }
    let ours = folder(tree, lost, b".cloche", 0o755, 0)?;
    let agent =
        Inode { size: agent_bytes, content: Content::Agent, ..Inode::plain(Kind::File, 0o555, AGENT) };
    file(tree, ours, b"agent", agent)?;

    // Elsewhere than in /dev they stay in the root, but gVisor gives no inode of EROFS a device number: its overlay takes
    // a character device for a whiteout and hides it, and a block device is 0:0.
    lost.devices += descendants(tree, ROOT, |kind| matches!(kind, Kind::Char | Kind::Block));
    let dev = folder(tree, lost, b"dev", 0o755, 0)?;
    for child in tree.children(dev) {
        if !planted::off("dev") {
            tree.remove(child);
        }
    }
    folder(tree, lost, b"proc", 0o555, 0)?;
    folder(tree, lost, b"sys", 0o555, 0)?;
    folder(tree, lost, b"workspace", 0o755, USER)?;
    // Where the agent mounts its own: if it had to make them, they would be its own in every built layer.
    let run = folder(tree, lost, b"run", 0o755, 0)?;
    if tree.child(run, b"cloche").is_none() {
        file(tree, run, b"cloche", Inode::plain(Kind::Folder, 0o755, 0))?;
    }

    // gVisor's tmpfs hides an empty /tmp that it creates itself; a file keeps it ours.
    let tmp = folder(tree, lost, b"tmp", 0o1777, 0)?;
    if tree.child(tmp, b".keep").is_none() {
        file(tree, tmp, b".keep", Inode::plain(Kind::File, 0o644, 0))?;
    }

    let Some(etc) = tree.walk(b"etc", Some(STAMP))? else { return Ok(()) };
    // Bound over at start with an id of the sandbox's own: the file must exist.
    if tree.child(etc, b"machine-id").is_none() {
        file(tree, etc, b"machine-id", Inode::plain(Kind::File, 0o644, 0))?;
    }
    let has_hosts = tree.child(etc, b"hosts").is_some_and(|node| {
        let inode = tree.inode(tree.inode_of(node));
        inode.kind != Kind::File || inode.size > 0
    });
    if !has_hosts {
        let hosts =
            Inode { size: HOSTS.len() as u64, content: Content::Hosts, ..Inode::plain(Kind::File, 0o644, 0) };
        file(tree, etc, b"hosts", hosts)?;
    }
    Ok(())
}

/// A directory of the root: the image's own where it is one, else a new one.
fn folder(tree: &mut Tree, lost: &mut Lost, name: &[u8], mode: u16, owner: u32) -> Outcome<u32> {
    let old = tree.child(ROOT, name).unwrap_or(NONE);
    if old != NONE && tree.kind(old) == Kind::Folder {
        return Ok(old);
    }
    if old != NONE {
        lost.replaced += 1;
    }
    let inode = tree.new_inode(Inode::plain(Kind::Folder, mode, owner));
    tree.put(ROOT, name, inode, STAMP)
}

fn file(tree: &mut Tree, parent: u32, name: &[u8], inode: Inode) -> Outcome<()> {
    let inode = tree.new_inode(inode);
    tree.put(parent, name, inode, STAMP).map(|_| ())
}

fn descendants(tree: &Tree, node: u32, counts: impl Fn(Kind) -> bool) -> u64 {
    let mut todo = tree.children(node);
    let mut found = 0;
    while let Some(node) = todo.pop() {
        found += u64::from(counts(tree.kind(node)));
        todo.extend(tree.children(node));
    }
    found
}
