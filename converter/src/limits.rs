//! How much of everything one job may have.

use crate::planted;
use crate::refusal::{refuse, Code, Outcome};
use serde::Deserialize;
use std::time::{Duration, Instant};

/// Below this much output the ratio says nothing: a file of zeros is no bomb yet.
pub const RATIO_FREE_BYTES: u64 = 64 << 20;
/// All names and link targets of a tree, kept in memory.
pub const TEXT_BYTES_MAX: usize = 128 << 20;
/// All paths of the finished tree, which mkfs.erofs keeps in memory.
pub const PATHS_BYTES_MAX: u64 = 256 << 20;
/// Linux's own limit for the target of a symbolic link.
pub const LINK_BYTES_MAX: usize = 4095;
/// Symbolic links followed while one parent is looked up, as Linux does it.
pub const LINK_HOPS_MAX: u32 = 40;

#[derive(Clone, Debug, Deserialize)]
pub struct Limits {
    pub raw_bytes: u64,
    pub entries: u32,
    pub depth: u32,
    pub name_bytes: usize,
    pub path_bytes: usize,
    pub header_bytes: u64,
    pub ratio: u64,
    pub seconds: u64,
}

impl Limits {
    /// Within one layer: what came out against what went in.
    pub fn check_ratio(&self, raw: u64, packed: u64) -> Outcome<()> {
        if raw > RATIO_FREE_BYTES && raw / self.ratio.max(1) > packed && !planted::off("ratio") {
            return refuse(
                Code::Ratio,
                format!("{packed} bytes became more than {raw}: above the ratio of {}", self.ratio),
            );
        }
        Ok(())
    }

    pub fn check_raw(&self, raw: u64) -> Outcome<()> {
        if raw > self.raw_bytes && !planted::off("raw_bytes") {
            return refuse(Code::TooLarge, format!("more than {} bytes when unpacked", self.raw_bytes));
        }
        Ok(())
    }

    pub fn check_entries(&self, entries: u64) -> Outcome<()> {
        if entries > u64::from(self.entries) && !planted::off("entries") {
            return refuse(Code::TooManyEntries, format!("more than {} entries", self.entries));
        }
        Ok(())
    }

    pub fn check_text(&self, bytes: usize) -> Outcome<()> {
        if bytes > TEXT_BYTES_MAX && !planted::off("text_bytes") {
            return refuse(Code::TooLarge, format!("names and links of more than {TEXT_BYTES_MAX} bytes"));
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    end: Instant,
    seconds: u64,
}

impl Deadline {
    pub fn new(seconds: u64) -> Self {
        Deadline { end: Instant::now() + Duration::from_secs(seconds), seconds }
    }

    pub fn check(&self) -> Outcome<()> {
        if Instant::now() > self.end && !planted::off("seconds") {
            return refuse(Code::TooLarge, format!("not finished after {} seconds", self.seconds));
        }
        Ok(())
    }
}

#[cfg(test)]
pub fn test_limits() -> Limits {
    Limits {
        raw_bytes: 1 << 30,
        entries: 1000,
        depth: 128,
        name_bytes: 255,
        path_bytes: 4096,
        header_bytes: 1 << 20,
        ratio: 1000,
        seconds: 60,
    }
}
