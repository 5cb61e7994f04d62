//! The numbers of `gen-1.json`; a test compares each with the file.

pub const GENERATION: u32 = 1;
pub const HEADER_BYTES: usize = 9;
pub const TRAILER_BYTES: usize = 4;
pub const PAYLOAD_BYTES_MAX: usize = 131_072;
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + PAYLOAD_BYTES_MAX + TRAILER_BYTES;
pub const NONCE_BYTES: usize = 16;
pub const RESET_PADDING_BYTES: usize = 131_085;
pub const WINDOW_BYTES_START: u64 = 65_536;
pub const WINDOW_BYTES_MAX: u64 = 1_048_576;
pub const WINDOWS_BYTES_PER_SANDBOX_MAX: u64 = 16_777_216;
pub const STREAMS_PER_OPENER_MAX: usize = 512;
pub const PING_BYTES_MAX: usize = 64;
pub const JSON_DEPTH_MAX: usize = 16;
pub const DRAIN_AFTER_EXIT_MS: u64 = 200;
pub const AGENT_UID: u32 = 64_000;

/// Capability numbers that a `package-install` command keeps:
/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, SETFCAP.
pub const PACKAGE_INSTALL_CAPABILITIES: [u32; 7] = [0, 1, 3, 4, 6, 7, 31];

pub const OPS: [&str; 16] = [
    "bind",
    "exec",
    "file.read",
    "file.write",
    "fs.stat",
    "fs.list",
    "fs.mkdir",
    "fs.move",
    "fs.remove",
    "fs.watch",
    "tree.read",
    "tree.write",
    "port.connect",
    "trust",
    "stats",
    "shutdown",
];
