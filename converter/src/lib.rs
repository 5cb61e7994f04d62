//! Turns hostile image archives into one file system.
//!
//! The daemon starts one process per job, with no rights, and talks to it over descriptor 0
//! (`protocol`). The process reads layers, an overlay's upper half or any tar, and writes only
//! to the descriptors that came with the job. Every byte it reads may be an attack: headers are
//! checked (`tar`, `paths`), quantities are bounded (`limits`), layers are merged in memory
//! (`tree`, `merge`), and nothing of the guest's tree ever touches the host's file system.
//!
//! Deliberately absent: paths of the host, sockets, children other than mkfs.erofs.

pub mod additions;
pub mod child;
pub mod decompress;
pub mod emit;
pub mod image;
pub mod index;
pub mod inode;
pub mod limits;
pub mod lock_down;
pub mod merge;
pub mod numbers;
pub mod paths;
pub mod pax;
pub mod pipeline;
pub mod planted;
pub mod protocol;
pub mod refusal;
pub mod source;
pub mod tar;
pub mod tree;
pub mod upper;
