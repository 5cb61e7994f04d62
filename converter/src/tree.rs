//! The merged tree of all layers, in memory: names (nodes) point to inodes, so that a hard link
//! keeps its content when a later layer replaces the other name.
//!
//! How layers change it is in `merge`.
//!
//! Each name costs about 30 bytes beside its text, each inode about 60.

use crate::inode::Inode;
use crate::limits::{Limits, PATHS_BYTES_MAX};
use crate::paths;
use crate::planted;
use crate::refusal::{refuse, Code, Outcome};
use crate::tar::Kind;
use hashbrown::HashTable;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

pub const ROOT: u32 = 0;
pub const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Node {
    parent: u32,
    first_child: u32,
    next: u32,
    previous: u32,
    inode: u32,
    name_at: u32,
    name_len: u16,
    /// The last layer that made this name or one below it.
    touched: u8,
}

pub struct Tree<'a> {
    limits: &'a Limits,
    nodes: Vec<Node>,
    pub(crate) inodes: Vec<Inode>,
    /// Names and link targets, one behind the other.
    text: Vec<u8>,
    table: HashTable<u32>,
    /// Keyed at random: names chosen to collide do not.
    hasher: RandomState,
}

impl<'a> Tree<'a> {
    pub fn new(limits: &'a Limits) -> Self {
        let root = Node {
            parent: ROOT,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            inode: 0,
            name_at: 0,
            name_len: 0,
            touched: 0,
        };
        Tree {
            limits,
            nodes: vec![root],
            inodes: vec![Inode::plain(Kind::Folder, 0o755, 0)],
            text: Vec::new(),
            table: HashTable::new(),
            hasher: RandomState::new(),
        }
    }

    pub fn limits(&self) -> &'a Limits {
        self.limits
    }

    pub fn name(&self, node: u32) -> &[u8] {
        let node = &self.nodes[node as usize];
        &self.text[node.name_at as usize..][..usize::from(node.name_len)]
    }

    pub fn parent(&self, node: u32) -> u32 {
        self.nodes[node as usize].parent
    }

    /// Whether `layer` made this name or one below it.
    pub fn is_touched(&self, node: u32, layer: u8) -> bool {
        self.nodes[node as usize].touched == layer
    }

    pub fn inode_of(&self, node: u32) -> u32 {
        self.nodes[node as usize].inode
    }

    pub fn inode(&self, number: u32) -> &Inode {
        &self.inodes[number as usize]
    }

    pub fn link(&self, inode: &Inode) -> &[u8] {
        &self.text[inode.link_at as usize..][..usize::from(inode.link_len)]
    }

    pub fn inodes(&self) -> usize {
        self.inodes.len()
    }

    pub fn kind(&self, node: u32) -> Kind {
        self.inode(self.inode_of(node)).kind
    }

    pub fn children(&self, node: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut child = self.nodes[node as usize].first_child;
        while child != NONE {
            found.push(child);
            child = self.nodes[child as usize].next;
        }
        found
    }

    pub fn path(&self, mut node: u32) -> Vec<u8> {
        let mut parts = Vec::new();
        while node != ROOT {
            parts.push(self.name(node));
            node = self.nodes[node as usize].parent;
        }
        parts.reverse();
        parts.join(&b'/')
    }

    pub fn child(&self, parent: u32, name: &[u8]) -> Option<u32> {
        let hash = self.hash(parent, name);
        self.table.find(hash, |&at| self.is_child(at, parent, name)).copied()
    }

    fn is_child(&self, at: u32, parent: u32, name: &[u8]) -> bool {
        self.nodes[at as usize].parent == parent && self.name(at) == name
    }

    fn hash(&self, parent: u32, name: &[u8]) -> u64 {
        self.hasher.hash_one((parent, name))
    }

    pub(crate) fn keep_text(&mut self, bytes: &[u8]) -> Outcome<u32> {
        self.limits.check_text(self.text.len() + bytes.len())?;
        let at = self.text.len() as u32;
        self.text.extend_from_slice(bytes);
        Ok(at)
    }

    /// A name in a directory: a directory over a directory keeps the children.
    pub fn put(&mut self, parent: u32, name: &[u8], inode: u32, layer: u8) -> Outcome<u32> {
        let is_folder = self.inode(inode).kind == Kind::Folder;
        let node = match self.child(parent, name) {
            Some(old) if is_folder && self.kind(old) == Kind::Folder => {
                self.nodes[old as usize].inode = inode;
                old
            }
            Some(old) if planted::off("inodes") => {
                let number = self.inode_of(old) as usize;
                self.inodes[number] = self.inodes[inode as usize];
                old
            }
            Some(old) => {
                if !planted::off("replace") {
                    self.remove(old);
                }
                self.add(parent, name, inode)?
            }
            None => self.add(parent, name, inode)?,
        };
        self.touch(node, layer);
        Ok(node)
    }

    pub fn new_inode(&mut self, inode: Inode) -> u32 {
        self.inodes.push(inode);
        self.inodes.len() as u32 - 1
    }

    fn add(&mut self, parent: u32, name: &[u8], inode: u32) -> Outcome<u32> {
        paths::check_part(name, self.limits)?;
        self.check_place(parent, name.len())?;
        self.limits.check_entries(self.nodes.len() as u64)?;
        let at = self.nodes.len() as u32;
        let name_at = self.keep_text(name)?;
        let next = self.nodes[parent as usize].first_child;
        self.nodes.push(Node {
            parent,
            first_child: NONE,
            next,
            previous: NONE,
            inode,
            name_at,
            name_len: name.len() as u16,
            touched: 0,
        });
        if next != NONE {
            self.nodes[next as usize].previous = at;
        }
        self.nodes[parent as usize].first_child = at;
        let hash = self.hash(parent, name);
        let (nodes, text, hasher) = (&self.nodes, &self.text, &self.hasher);
        self.table.insert_unique(hash, at, |&at| {
            let node = &nodes[at as usize];
            hasher.hash_one((node.parent, &text[node.name_at as usize..][..usize::from(node.name_len)]))
        });
        Ok(at)
    }

    /// Links can make a path longer than its entry said.
    fn check_place(&self, parent: u32, name_bytes: usize) -> Outcome<()> {
        let (mut depth, mut bytes, mut node) = (1, name_bytes, parent);
        while node != ROOT {
            let here = &self.nodes[node as usize];
            depth += 1;
            bytes += 1 + usize::from(here.name_len);
            node = here.parent;
        }
        if depth > self.limits.depth && !planted::off("depth") {
            return refuse(Code::TooDeep, format!("more than {} directories deep", self.limits.depth));
        }
        if bytes > self.limits.path_bytes && !planted::off("path_bytes") {
            return refuse(
                Code::NameTooLong,
                format!("a path of more than {} bytes", self.limits.path_bytes),
            );
        }
        Ok(())
    }

    fn touch(&mut self, mut node: u32, layer: u8) {
        loop {
            self.nodes[node as usize].touched = layer;
            if node == ROOT {
                return;
            }
            node = self.nodes[node as usize].parent;
            if node != ROOT && self.nodes[node as usize].touched == layer {
                return;
            }
        }
    }

    /// Takes a name and everything below it away; inodes stay for whoever else names them.
    pub fn remove(&mut self, node: u32) {
        let Node { parent, next, previous, .. } = self.nodes[node as usize];
        match previous {
            NONE => self.nodes[parent as usize].first_child = next,
            _ => self.nodes[previous as usize].next = next,
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        let mut doomed = vec![node];
        while let Some(node) = doomed.pop() {
            doomed.extend(self.children(node));
            let hash = self.hash(self.nodes[node as usize].parent, self.name(node));
            if let Ok(found) = self.table.find_entry(hash, |&at| at == node) {
                found.remove();
            }
        }
    }

    /// All names, each directory before what it holds, sorted by bytes.
    pub fn ordered(&self) -> Outcome<Vec<u32>> {
        let mut order = Vec::new();
        let mut todo = vec![(ROOT, 0u64)];
        let mut paths_bytes = 0;
        while let Some((node, path_bytes)) = todo.pop() {
            order.push(node);
            paths_bytes += path_bytes;
            if paths_bytes > PATHS_BYTES_MAX && !planted::off("paths_bytes") {
                return refuse(
                    Code::TooLarge,
                    format!("paths of more than {PATHS_BYTES_MAX} bytes together"),
                );
            }
            let mut children = self.children(node);
            children.sort_unstable_by(|&a, &b| self.name(b).cmp(self.name(a)));
            todo.extend(
                children.into_iter().map(|child| (child, path_bytes + 1 + self.name(child).len() as u64)),
            );
        }
        Ok(order)
    }
}
