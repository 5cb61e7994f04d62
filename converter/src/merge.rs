//! How entries of layers change the tree.
//!
//! Rules, which are umoci's and Docker's:
//! - a whiteout hides what lower layers have; what its own layer has stays, in either order;
//! - a directory over a directory keeps the children and takes the new owner, mode and time;
//!   anything else replaces what was there;
//! - the last of two entries of one name wins;
//! - parents that are missing are made, 0755 and root's;
//! - a symbolic link in the middle of a path is followed, inside this tree and nowhere else:
//!   `/` is the tree's root and `..` stops there. A file in the middle of a path is refused.

use crate::inode::{check_target, Content, Inode};
use crate::limits::LINK_HOPS_MAX;
use crate::paths;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome};
use crate::tar::{Header, Kind};
use crate::tree::{Tree, ROOT};

impl Tree<'_> {
    /// Puts one entry of `layer` where it belongs. Its content begins at `offset` of the scratch file.
    pub fn insert(&mut self, path: &[u8], header: &Header, offset: u64, layer: u8) -> Outcome<()> {
        if path.is_empty() {
            if header.kind != Kind::Folder && !planted::off("root_folder") {
                return refuse(Code::BadName, "the root is not a directory");
            }
            self.inodes[0] = self.inode_from(header, offset)?;
            return Ok(());
        }
        let inode = match header.kind {
            Kind::HardLink => self.link_target(path, &header.link)?,
            _ => {
                let inode = self.inode_from(header, offset)?;
                self.inodes.push(inode);
                self.inodes.len() as u32 - 1
            }
        };
        let (folder, name) = paths::split(path);
        let Some(parent) = self.walk(folder, Some(layer))? else {
            return refuse(Code::BadName, "its parent is not a directory");
        };
        self.put(parent, name, inode, layer)?;
        Ok(())
    }

    fn inode_from(&mut self, header: &Header, offset: u64) -> Outcome<Inode> {
        let mut inode = Inode::plain(header.kind, header.mode as u16, 0);
        if header.kind == Kind::Symlink {
            check_target(&header.link)?;
            inode.link_at = self.keep_text(&header.link)?;
            inode.link_len = header.link.len() as u16;
        }
        inode.size = header.size;
        inode.content = Content::Scratch(offset);
        inode.mtime = header.mtime;
        (inode.uid, inode.gid) = (header.uid, header.gid);
        (inode.major, inode.minor) = (header.major, header.minor);
        inode.opaque = header.opaque;
        Ok(inode)
    }

    /// The inode that a hard link names: it must be there already, and not be a directory.
    fn link_target(&mut self, path: &[u8], target: &[u8]) -> Outcome<u32> {
        let bad = |message| refuse(Code::BadLink, message);
        let target = match paths::normalised(target, self.limits()) {
            Ok(target) => target,
            Err(_) if planted::off("link_dotdot") => {
                return Ok(self.new_inode(Inode::plain(Kind::File, 0o644, 0)));
            }
            Err(refusal) => return bad(format!("a hard link's target has {}", refusal.message)),
        };
        if target == path && !planted::off("link_self") {
            return bad("a hard link to itself".into());
        }
        let (folder, name) = paths::split(&target);
        let found = match self.walk(folder, None)? {
            Some(parent) if !name.is_empty() => self.child(parent, name),
            _ => None,
        };
        match found {
            Some(node) if self.kind(node) != Kind::Folder || planted::off("link_folder") => {
                Ok(self.inode_of(node))
            }
            Some(_) => bad("a hard link to a directory".into()),
            None if planted::off("link_missing") => Ok(self.new_inode(Inode::plain(Kind::File, 0o644, 0))),
            None => bad("a hard link to what is not there".into()),
        }
    }

    /// The directory that a path leads to. With a layer, what is missing is made; without, it is `None`.
    pub fn walk(&mut self, path: &[u8], make: Option<u8>) -> Outcome<Option<u32>> {
        let mut rest = path.to_vec();
        let (mut at, mut position, mut hops) = (ROOT, 0, 0);
        while position < rest.len() {
            let end =
                rest[position..].iter().position(|&byte| byte == b'/').map_or(rest.len(), |n| position + n);
            let part = rest[position..end].to_vec();
            position = end + 1;
            match &part[..] {
                b"" | b"." => continue,
                b".." => {
                    at = self.parent(at);
                    continue;
                }
                _ => {}
            }
            let child = self.child(at, &part);
            match (child, child.map(|node| self.kind(node)), make) {
                (Some(node), Some(Kind::Folder), _) => at = node,
                (Some(node), Some(Kind::Symlink), _) => {
                    hops += 1;
                    if hops > LINK_HOPS_MAX && !planted::off("link_hops") {
                        return refuse(Code::BadLink, "its parents are a loop of symbolic links");
                    }
                    let target = self.link(self.inode(self.inode_of(node))).to_vec();
                    if target.first() == Some(&b'/') {
                        at = ROOT;
                    }
                    rest = [&target[..], b"/", rest.get(position..).unwrap_or_default()].concat();
                    position = 0;
                    if hops > 4 * LINK_HOPS_MAX {
                        return Ok(Some(ROOT));
                    }
                }
                (None, _, Some(layer)) => {
                    let folder = Inode { implied: true, ..Inode::plain(Kind::Folder, 0o755, 0) };
                    let inode = self.new_inode(folder);
                    at = self.put(at, &part, inode, layer)?;
                }
                (Some(node), _, Some(_)) if planted::off("file_parent") => at = node,
                (Some(_), _, Some(_)) => return refuse(Code::BadName, "a parent of it is not a directory"),
                (_, _, None) => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// `.wh.NAME`: what lower layers have under that path goes.
    pub fn whiteout(&mut self, path: &[u8], layer: u8) -> Outcome<()> {
        let (folder, name) = paths::split(path);
        if let Some(parent) = self.walk(folder, None)? {
            if let Some(node) = self.child(parent, name) {
                self.prune(vec![node], layer);
            }
        }
        Ok(())
    }

    /// `.wh..wh..opq`: what lower layers have in that directory goes.
    pub fn opaque(&mut self, folder: &[u8], layer: u8) -> Outcome<()> {
        if let Some(node) = self.walk(folder, None)? {
            self.prune(self.children(node), layer);
        }
        Ok(())
    }

    fn prune(&mut self, mut suspects: Vec<u32>, layer: u8) {
        while let Some(node) = suspects.pop() {
            if !self.is_touched(node, layer) || planted::off("whiteout_lower_only") {
                self.remove(node);
            } else {
                suspects.extend(self.children(node));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{test_limits, Limits};
    use crate::tar::Time;

    fn header(kind: Kind, link: &[u8]) -> Header {
        Header {
            name: Vec::new(),
            kind,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: 0,
            mtime: Time::default(),
            link: link.to_vec(),
            major: 0,
            minor: 0,
            xattrs: Vec::new(),
            opaque: false,
            offset: 0,
        }
    }

    fn add(tree: &mut Tree, path: &str, kind: Kind, link: &str, layer: u8) -> Outcome<()> {
        let offset = u64::from(layer);
        tree.insert(path.as_bytes(), &header(kind, link.as_bytes()), offset, layer)
    }

    fn all(tree: &Tree) -> Vec<String> {
        let mut found = Vec::new();
        let mut todo = vec![ROOT];
        while let Some(node) = todo.pop() {
            todo.extend(tree.children(node));
            found.push(String::from_utf8(tree.path(node)).unwrap());
        }
        found.sort();
        found.remove(0);
        found
    }

    #[test]
    fn whiteouts_spare_their_own_layer() {
        let limits = test_limits();
        let mut tree = Tree::new(&limits);
        for path in ["d/old", "d/keep/old", "e"] {
            add(&mut tree, path, Kind::File, "", 1).unwrap();
        }
        add(&mut tree, "d/keep/new", Kind::File, "", 2).unwrap();
        tree.whiteout(b"d", 2).unwrap();
        tree.whiteout(b"e", 2).unwrap();
        tree.whiteout(b"missing/x", 2).unwrap();
        assert_eq!(all(&tree), ["d", "d/keep", "d/keep/new"]);
        tree.opaque(b"", 3).unwrap();
        assert!(all(&tree).is_empty());
    }

    #[test]
    fn hard_links_keep_their_inode() {
        let limits = test_limits();
        let mut tree = Tree::new(&limits);
        add(&mut tree, "a", Kind::File, "", 1).unwrap();
        add(&mut tree, "b", Kind::HardLink, "a", 1).unwrap();
        add(&mut tree, "a", Kind::File, "", 2).unwrap();
        let content =
            |tree: &Tree, name: &[u8]| tree.inode(tree.inode_of(tree.child(ROOT, name).unwrap())).content;
        assert_eq!(content(&tree, b"a"), Content::Scratch(2));
        assert_eq!(content(&tree, b"b"), Content::Scratch(1));
        let code = |tree: &mut Tree, link: &str| add(tree, "c", Kind::HardLink, link, 2).unwrap_err().code;
        add(&mut tree, "dir", Kind::Folder, "", 2).unwrap();
        assert_eq!(code(&mut tree, "dir"), Code::BadLink);
        assert_eq!(code(&mut tree, "nothing"), Code::BadLink);
        assert_eq!(code(&mut tree, "c"), Code::BadLink);
        assert_eq!(code(&mut tree, "../a"), Code::BadLink);
        assert_eq!(code(&mut tree, ""), Code::BadLink);
    }

    #[test]
    fn links_are_followed_inside() {
        let limits = test_limits();
        let mut tree = Tree::new(&limits);
        add(&mut tree, "out", Kind::Symlink, "../../../etc", 1).unwrap();
        add(&mut tree, "out/passwd", Kind::File, "", 1).unwrap();
        add(&mut tree, "abs", Kind::Symlink, "/srv/x", 1).unwrap();
        add(&mut tree, "abs/f", Kind::File, "", 1).unwrap();
        assert_eq!(all(&tree), ["abs", "etc", "etc/passwd", "out", "srv", "srv/x", "srv/x/f"]);
        add(&mut tree, "l1", Kind::Symlink, "l2", 1).unwrap();
        add(&mut tree, "l2", Kind::Symlink, "l1", 1).unwrap();
        assert_eq!(add(&mut tree, "l1/f", Kind::File, "", 1).unwrap_err().code, Code::BadLink);
        add(&mut tree, "etc/passwd/x", Kind::File, "", 1).unwrap_err();
    }

    #[test]
    fn replacement() {
        let limits = test_limits();
        let mut tree = Tree::new(&limits);
        add(&mut tree, "d/f", Kind::File, "", 1).unwrap();
        add(&mut tree, "d", Kind::Folder, "", 2).unwrap();
        assert_eq!(all(&tree), ["d", "d/f"]);
        add(&mut tree, "d", Kind::File, "", 3).unwrap();
        assert_eq!(all(&tree), ["d"]);
        add(&mut tree, "d", Kind::Folder, "", 4).unwrap();
        add(&mut tree, "d/g", Kind::File, "", 4).unwrap();
        assert_eq!(all(&tree), ["d", "d/g"]);
    }

    #[test]
    fn implied_parents_are_counted() {
        let limits = Limits { entries: 10, ..test_limits() };
        let mut tree = Tree::new(&limits);
        let refusal = add(&mut tree, &"d/".repeat(20), Kind::File, "", 1).unwrap_err();
        assert_eq!(refusal.code, Code::TooManyEntries);
    }

    #[test]
    fn links_do_not_deepen() {
        let limits = Limits { depth: 8, ..test_limits() };
        let mut tree = Tree::new(&limits);
        add(&mut tree, "a/b/c/d/e", Kind::Folder, "", 1).unwrap();
        add(&mut tree, "s", Kind::Symlink, "a/b/c/d/e", 1).unwrap();
        assert_eq!(add(&mut tree, "s/f/g/h/i", Kind::File, "", 1).unwrap_err().code, Code::TooDeep);
    }
}
