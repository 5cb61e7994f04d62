//! `stats`: what the sandbox uses, as its own kernel tells it.

use crate::exec::boot_clock_ns;
use crate::json::Object;

pub fn read(commands: usize) -> String {
    let (disk_size, disk_used) = disk();
    Object::new()
        .number("processes", processes())
        .number("memory_bytes", memory_bytes())
        .number("disk_used_bytes", disk_used)
        .number("disk_size_bytes", disk_size)
        .number("uptime_ns", boot_clock_ns())
        .number("commands", commands as u64)
        .finish()
}

fn processes() -> u64 {
    let Ok(entries) = std::fs::read_dir("/proc") else { return 0 };
    let is_pid = |name: &[u8]| name.iter().all(u8::is_ascii_digit);
    entries.flatten().filter(|entry| is_pid(entry.file_name().as_encoded_bytes())).count() as u64
}

/// Used, not counting what the kernel gives back at once.
fn memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB").unwrap_or(line).trim().parse().ok()
    };
    let free = field("MemAvailable").or_else(|| field("MemFree")).unwrap_or(0);
    field("MemTotal").unwrap_or(0).saturating_sub(free) * 1024
}

/// Size and use of the root file system.
fn disk() -> (u64, u64) {
    let Ok(fs) = rustix::fs::statvfs("/") else { return (0, 0) };
    let unit = fs.f_frsize.max(1);
    (fs.f_blocks.saturating_mul(unit), fs.f_blocks.saturating_sub(fs.f_bfree).saturating_mul(unit))
}
