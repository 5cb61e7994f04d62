//! The guest channel, generation 1 (`protocol/guest/README.md` is the contract).
//!
//! Words: a *frame* is kind, stream, length, payload, checksum; *padding* is a zero byte where a
//! kind is expected; a decoder *scans* after an error until the next valid RESET.
//! Deliberately absent: descriptors, clocks, JSON. Bytes in, frames out.

mod decode;
mod frame;
pub mod limits;

pub use decode::{Decoder, FrameError};
pub use frame::{encode, encode_with, Frame, Kind};
