//! The guest agent: PID 1 of a sandbox. One loop, no threads, no runtime.
//!
//! Words: a *session* is the pure bookkeeping of streams, credit and re-attach; a *carrier* is the
//! descriptor that joins guest and host; an *operation* is what a stream asked for; a *worker* is a
//! forked child that does one file operation as the user it is for.
//! Deliberately absent: name lookups through libc, a shell, any path touched with the agent's own rights
//! on a caller's behalf, any blocking call in the loop but the start of a child.

pub mod bind;
pub mod buffer;
mod calls;
pub mod carrier;
pub mod child;
pub mod context;
pub mod egress;
pub mod exec;
pub mod failure;
pub mod files;
pub mod folders;
pub mod guest;
pub mod json;
pub mod microvm;
pub mod operation;
pub mod outbox;
pub mod poller;
pub mod port;
pub mod pty;
pub mod pump;
pub mod reattach;
pub mod rights;
pub mod sending;
pub mod serve;
pub mod session;
pub mod stats;
pub mod stream;
pub mod tar;
pub mod tree_read;
pub mod tree_write;
pub mod users;
pub mod watch;
pub mod wire;
pub mod worker;
