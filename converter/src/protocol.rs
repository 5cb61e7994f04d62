//! Descriptor 0: one job with its descriptors in, messages out. Each is a length (u32, little
//! endian) and that many bytes of JSON.

use crate::decompress::Compression;
use crate::limits::Limits;
use crate::refusal::Refusal;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, RawFd};
use std::time::{Duration, Instant};

const CHANNEL: RawFd = 0;
const JOB_BYTES_MAX: usize = 1 << 20;
const MESSAGE_BYTES_MAX: usize = 64 << 10;
const DESCRIPTORS_MAX: usize = 160;
pub const LAYERS_MAX: usize = 128;
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Deserialize)]
#[serde(tag = "job", rename_all = "lowercase")]
pub enum Job {
    Image {
        layers: Vec<Layer>,
        limits: Limits,
        #[serde(default)]
        agent_mode: bool,
    },
    Upper {
        limits: Limits,
        compression: Compression,
        #[serde(default)]
        drop: Vec<String>,
    },
    Index {
        limits: Limits,
        #[serde(default)]
        hash: bool,
    },
}

#[derive(Debug, Deserialize)]
pub struct Layer {
    pub compression: Compression,
    pub size: u64,
    pub digest: String,
    pub diff_id: String,
}

impl Job {
    pub fn limits(&self) -> &Limits {
        match self {
            Job::Image { limits, .. } | Job::Upper { limits, .. } | Job::Index { limits, .. } => limits,
        }
    }

    /// How many descriptors must have come with it.
    pub fn descriptors(&self) -> usize {
        match self {
            Job::Image { layers, .. } => 3 + layers.len(),
            Job::Upper { .. } | Job::Index { .. } => 2,
        }
    }
}

/// The job and its descriptors, in the order the daemon gave them.
pub fn receive() -> io::Result<(Job, Vec<File>)> {
    let mut length = [0u8; 4];
    let (got, files) = receive_first(&mut length)?;
    read_exact(&mut length[got..])?;
    let length = u32::from_le_bytes(length) as usize;
    if length > JOB_BYTES_MAX {
        return Err(io::Error::other("the job is too long"));
    }
    let mut body = vec![0u8; length];
    read_exact(&mut body)?;
    let job: Job = serde_json::from_slice(&body).map_err(io::Error::other)?;
    if let Job::Image { layers, .. } = &job {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            return Err(io::Error::other("no layers, or too many"));
        }
    }
    if files.len() != job.descriptors() {
        return Err(io::Error::other(format!("{} descriptors, expected {}", files.len(), job.descriptors())));
    }
    Ok((job, files))
}

/// The first bytes, with which the descriptors come.
fn receive_first(bytes: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
    // u64 for the alignment that control messages need.
    let mut control = [0u64; (DESCRIPTORS_MAX * 4 + 64) / 8];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: an all-zero msghdr is a valid one.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = std::mem::size_of_val(&control) as _;
    // SAFETY: all pointers in `message` are to live buffers of the lengths given.
    let got = unsafe { libc::recvmsg(CHANNEL, &mut message, libc::MSG_CMSG_CLOEXEC) };
    if got <= 0 {
        return Err(if got < 0 { io::Error::last_os_error() } else { io::Error::other("no job came") });
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::other("too many descriptors"));
    }
    let mut files = Vec::new();
    // SAFETY: the CMSG macros stay within the control buffer that the kernel just filled, and each
    // descriptor in it is new and ours.
    unsafe {
        let mut head = libc::CMSG_FIRSTHDR(&message);
        while !head.is_null() {
            if (*head).cmsg_level == libc::SOL_SOCKET && (*head).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*head).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(head).cast::<RawFd>();
                for at in 0..bytes / std::mem::size_of::<RawFd>() {
                    files.push(File::from_raw_fd(data.add(at).read_unaligned()));
                }
            }
            head = libc::CMSG_NXTHDR(&message, head);
        }
    }
    Ok((got as usize, files))
}

fn read_exact(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        // SAFETY: the buffer is live and of that length.
        match unsafe { libc::read(CHANNEL, bytes.as_mut_ptr().cast(), bytes.len()) } {
            0 => return Err(io::Error::other("the job ends too early")),
            got if got < 0 => return Err(io::Error::last_os_error()),
            got => bytes = &mut bytes[got as usize..],
        }
    }
    Ok(())
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Message<D: Serialize> {
    Progress { layer: u32, bytes: u64 },
    Done(D),
    Refused(D),
}

fn frame<D: Serialize>(message: &Message<D>) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("our own messages can be written as JSON");
    assert!(body.len() <= MESSAGE_BYTES_MAX, "a message is too long");
    [&(body.len() as u32).to_le_bytes()[..], &body].concat()
}

fn send(bytes: &[u8], flags: libc::c_int) -> isize {
    // SAFETY: the buffer is live and of that length; no address is given.
    unsafe {
        libc::sendto(
            CHANNEL,
            bytes.as_ptr().cast(),
            bytes.len(),
            flags | libc::MSG_NOSIGNAL,
            std::ptr::null(),
            0,
        )
    }
}

pub fn done<D: Serialize>(result: &D) {
    send_whole(&frame(&Message::Done(result)));
}

pub fn refused(refusal: &Refusal) {
    send_whole(&frame(&Message::Refused(refusal)));
}

/// When the daemon is gone there is nobody to tell.
fn send_whole(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match send(bytes, 0) {
            sent if sent > 0 => bytes = &bytes[sent as usize..],
            _ => return,
        }
    }
}

/// At most ten messages a second, and none that would have to wait for the daemon.
pub struct Progress {
    last: Instant,
}

impl Default for Progress {
    fn default() -> Self {
        Progress { last: Instant::now() }
    }
}

impl Progress {
    pub fn tell(&mut self, layer: u32, bytes: u64) {
        let now = Instant::now();
        if now.duration_since(self.last) >= PROGRESS_EVERY {
            self.last = now;
            let whole = frame(&Message::<()>::Progress { layer, bytes });
            let sent = send(&whole, libc::MSG_DONTWAIT);
            if sent > 0 && (sent as usize) < whole.len() {
                send_whole(&whole[sent as usize..]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs() {
        let limits = r#"{"raw_bytes":1,"entries":1,"depth":1,"name_bytes":255,"path_bytes":4096,"header_bytes":1,"ratio":1,"seconds":1}"#;
        let text = format!(
            r#"{{"job":"image","layers":[{{"compression":"gzip","size":1,"digest":"d","diff_id":"e"}}],"limits":{limits},"agent_mode":true,"new":1}}"#
        );
        let job: Job = serde_json::from_str(&text).unwrap();
        assert_eq!(job.descriptors(), 4);
        let text = format!(r#"{{"job":"upper","limits":{limits},"compression":"none"}}"#);
        assert_eq!(serde_json::from_str::<Job>(&text).unwrap().descriptors(), 2);
        assert!(serde_json::from_str::<Job>(r#"{"job":"other"}"#).is_err());
    }

    #[test]
    fn frames() {
        let bytes = frame(&Message::<()>::Progress { layer: 1, bytes: 2 });
        assert_eq!(&bytes[4..], br#"{"progress":{"layer":1,"bytes":2}}"#);
        assert_eq!(bytes[0] as usize, bytes.len() - 4);
    }
}
