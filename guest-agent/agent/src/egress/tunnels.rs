//! A connection of a program in the guest and its stream to the host: bytes both ways, each end as it came.

use super::listeners::Place;
use super::Egress;
use crate::calls;
use crate::guest::is_guests;
use crate::json::Object;
use crate::operation::{token, Role};
use crate::poller::{Poller, Ready, Want};
use crate::serve::Agent;
use crate::session::Session;
use crate::wire;
use cloche_protocol::limits::PAYLOAD_BYTES_MAX;
use cloche_protocol::{Frame, Kind};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// The host allows 512 streams, and has windows for 256.
const TUNNELS_MAX: usize = 240;
/// What one turn reads of one connection.
const READ_BYTES: usize = 524_288;
/// How long a client may go on sending to a connection that the host has ended: closing on unread bytes would take
/// the last words back from it.
const LINGER: Duration = Duration::from_secs(2);

pub struct Tunnel {
    socket: OwnedFd,
    want: Option<Want>,
    /// The client has said all; or nothing it says is heard any more.
    read_over: bool,
    /// The client has been told all.
    write_over: bool,
    /// The socket takes no more for now.
    blocked: bool,
    /// The host said END: what it sent before is still handed over.
    ended: bool,
    /// All is handed over; only the client's own end is waited for.
    lingers: bool,
}

#[derive(Default)]
pub struct Tunnels {
    open: BTreeMap<u32, Tunnel>,
    lingering: VecDeque<(Instant, u32)>,
}

impl Tunnels {
    pub fn due(&self) -> Option<Instant> {
        self.lingering.front().map(|(until, _)| *until)
    }
}

impl Tunnel {
    fn watch(&mut self, id: u32, poller: &Poller, want: Option<Want>) {
        if self.want == want {
            return;
        }
        let (fd, token) = (self.socket.as_raw_fd(), token(id, Role::Output));
        let done = match (self.want, want) {
            (_, None) => {
                poller.remove(fd);
                Ok(())
            }
            (None, Some(want)) => poller.add(fd, want, token),
            (Some(_), Some(want)) => poller.change(fd, want, token),
        };
        self.want = want.filter(|_| done.is_ok());
    }

    /// With RST: what the client has sent or not yet read is void.
    fn reset(self, poller: &Poller) {
        // Refused: the client sees an ordinary end.
        let _ = rustix::net::sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
        self.close(poller);
    }

    fn close(self, poller: &Poller) {
        if self.want.is_some() {
            poller.remove(self.socket.as_raw_fd());
        }
    }
}

enum Done {
    Some(usize),
    Later,
    Over,
    Failed,
}

fn result(count: isize) -> Done {
    match count {
        0 => Done::Over,
        count if count > 0 => Done::Some(count as usize),
        _ => match io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Done::Later,
            _ => Done::Failed,
        },
    }
}

fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Done {
    // SAFETY: pointer and length describe the buffer.
    result(unsafe { calls::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) })
}

/// From the client into a frame at once, or by way of the stream's buffer; how much was asked for, and what came.
fn receive_into(
    session: &mut Session,
    id: u32,
    socket: &OwnedFd,
    room: usize,
    scratch: &mut Vec<u8>,
) -> (usize, Done) {
    let straight = |to: *mut u8, most: usize| {
        // SAFETY: `most` bytes from the pointer on are ours to write.
        match result(unsafe { calls::recv(socket.as_raw_fd(), to.cast(), most, 0) }) {
            Done::Some(count) => (count, (most, Done::Some(count))),
            other => (0, (most, other)),
        }
    };
    // SAFETY: recv wrote as many bytes as it says.
    if let Some((_, done)) = unsafe { session.read_out(id, room, straight) } {
        return done;
    }
    let most = room.min(PAYLOAD_BYTES_MAX);
    if scratch.len() < most {
        scratch.resize(most, 0);
    }
    let done = receive(socket, &mut scratch[..most]);
    if let Done::Some(count) = done {
        session.output(id, &scratch[..count]);
    }
    (most, done)
}

fn send(socket: &OwnedFd, bytes: &[u8]) -> Done {
    // SAFETY: pointer and length describe the bytes.
    result(unsafe { calls::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) })
}

impl Egress {
    /// Data for a client that waits for it goes straight to it; what it does not take is left.
    pub(crate) fn hand_over<'a>(&mut self, frame: Frame<'a>, session: &mut Session) -> Frame<'a> {
        if frame.kind != Kind::Data || !is_guests(frame.stream) {
            return frame;
        }
        match self.tunnels.open.get(&frame.stream) {
            Some(tunnel) if !tunnel.blocked => {
                session.pass_in(frame, |bytes| match send(&tunnel.socket, bytes) {
                    Done::Some(count) => count,
                    _ => 0,
                })
            }
            _ => frame,
        }
    }
}

impl Agent {
    pub(crate) fn has_room_for_a_tunnel(&self) -> bool {
        self.egress.tunnels.open.len() < TUNNELS_MAX && self.session.guest_streams() < TUNNELS_MAX
    }

    pub(crate) fn admit_tunnel(&mut self, socket: OwnedFd, place: Place) {
        let (op, open) = match place {
            Place::Slot(slot) => ("proxy", Object::new().text("op", "proxy").number("slot", slot)),
            Place::Name(number, port) => {
                let Some(name) = self.egress.names.of(number) else { return };
                let open = Object::new().text("op", "connect").text("name", name).number("port", port);
                ("connect", open)
            }
            Place::Resolver => return,
        };
        // Small requests must not wait for more; refused: slower, not wrong.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        let Some(id) = self.session.open_out(op, open.finish().into_bytes()) else { return };
        let tunnel = Tunnel {
            socket,
            want: None,
            read_over: false,
            write_over: false,
            blocked: false,
            ended: false,
            lingers: false,
        };
        self.egress.tunnels.open.insert(id, tunnel);
        self.session.want_input(id);
        self.watch_tunnel(id);
    }

    pub(crate) fn on_tunnel(&mut self, id: u32, ready: Ready) {
        let Some(tunnel) = self.egress.tunnels.open.get_mut(&id) else { return };
        if tunnel.lingers {
            return self.read_last(id);
        }
        if ready.failed {
            return self.give_up(id);
        }
        let (reads, writes) = match tunnel.want {
            Some(Want::Both) => (true, true),
            Some(Want::Read) => (true, false),
            Some(Want::Write) => (false, true),
            _ => (false, false),
        };
        if !reads && !writes {
            // It has hung up, and there is no room yet for what it said before: that would be reported for ever.
            return tunnel.watch(id, &self.poller, None);
        }
        if writes && ready.write {
            self.write_tunnel(id);
        }
        if reads && ready.read {
            self.read_tunnel(id);
        }
    }

    /// From the client to the host.
    fn read_tunnel(&mut self, id: u32) {
        let Some(tunnel) = self.egress.tunnels.open.get_mut(&id) else { return };
        let mut left = READ_BYTES;
        loop {
            let room = self.session.room(id).min(left);
            if room == 0 {
                break;
            }
            let (asked, done) = receive_into(&mut self.session, id, &tunnel.socket, room, &mut self.scratch);
            match done {
                Done::Some(count) => {
                    left -= count;
                    if count < asked {
                        break;
                    }
                }
                Done::Later => break,
                Done::Over => {
                    tunnel.read_over = true;
                    self.session.output_end(id);
                    break;
                }
                Done::Failed => return self.give_up(id),
            }
        }
        self.watch_tunnel(id);
        self.settle_tunnel(id);
    }

    /// A socket that took no more says itself when it does.
    pub(crate) fn on_tunnel_input(&mut self, id: u32) {
        if self.egress.tunnels.open.get(&id).is_none_or(|tunnel| !tunnel.blocked) {
            self.write_tunnel(id);
        }
    }

    /// From the host to the client.
    pub(crate) fn write_tunnel(&mut self, id: u32) {
        let Some(tunnel) = self.egress.tunnels.open.get_mut(&id) else {
            return self.session.drop_input(id);
        };
        tunnel.blocked = false;
        loop {
            let bytes = self.session.input(id);
            if bytes.is_empty() {
                break;
            }
            match send(&tunnel.socket, bytes) {
                Done::Some(count) => self.session.taken(id, count),
                Done::Later => {
                    tunnel.blocked = true;
                    return self.watch_tunnel(id);
                }
                Done::Over | Done::Failed => return self.give_up(id),
            }
        }
        if self.session.input_is_over(id) && !tunnel.write_over {
            tunnel.write_over = true;
            // SAFETY: no pointers.
            unsafe { libc::shutdown(tunnel.socket.as_raw_fd(), libc::SHUT_WR) };
        }
        self.watch_tunnel(id);
        self.settle_tunnel(id);
    }

    /// Registers for what can go on now.
    pub(crate) fn watch_tunnel(&mut self, id: u32) {
        let room = self.session.room(id) > 0;
        let Some(tunnel) = self.egress.tunnels.open.get_mut(&id).filter(|tunnel| !tunnel.lingers) else {
            return;
        };
        let want = match (!tunnel.read_over && room, tunnel.blocked) {
            (true, true) => Want::Both,
            (true, false) => Want::Read,
            (false, true) => Want::Write,
            (false, false) => Want::Nothing,
        };
        tunnel.watch(id, &self.poller, Some(want));
    }

    /// The host ended it: at once, or after its last words.
    pub(crate) fn on_tunnel_end(&mut self, id: u32, payload: &[u8]) {
        let well = serde_json::from_slice::<wire::End>(payload).is_ok_and(|end| end.ok.is_some());
        match self.egress.tunnels.open.get_mut(&id) {
            Some(tunnel) if well => {
                tunnel.ended = true;
                self.write_tunnel(id);
            }
            _ => {
                self.session.forget_out(id);
                self.cut(id);
            }
        }
    }

    /// Closes the socket when both sides have said all; END, if it has not come, is waited for without it.
    fn settle_tunnel(&mut self, id: u32) {
        let tunnels = &mut self.egress.tunnels;
        let Some(tunnel) = tunnels.open.get_mut(&id).filter(|tunnel| tunnel.write_over) else { return };
        if tunnel.ended {
            self.session.forget_out(id);
        }
        if tunnel.read_over {
            let tunnel = tunnels.open.remove(&id).expect("it was just here");
            tunnel.close(&self.poller);
        } else if tunnel.ended {
            tunnel.lingers = true;
            tunnel.watch(id, &self.poller, Some(Want::Read));
            tunnels.lingering.push_back((Instant::now() + LINGER, id));
        }
    }

    /// What the client still says is dropped, until it says no more.
    fn read_last(&mut self, id: u32) {
        let Some(tunnel) = self.egress.tunnels.open.get_mut(&id) else { return };
        let mut dropped = [0u8; 16_384];
        if let Done::Over | Done::Failed = receive(&tunnel.socket, &mut dropped) {
            let tunnel = self.egress.tunnels.open.remove(&id).expect("it was just here");
            tunnel.close(&self.poller);
        }
    }

    pub(crate) fn end_lingering(&mut self) {
        let tunnels = &mut self.egress.tunnels;
        while let Some((_, id)) =
            tunnels.lingering.front().copied().filter(|(until, _)| *until <= Instant::now())
        {
            tunnels.lingering.pop_front();
            if let Some(tunnel) = tunnels.open.remove(&id) {
                tunnel.close(&self.poller);
            }
        }
    }

    /// The client is gone: so is its stream.
    fn give_up(&mut self, id: u32) {
        if let Some(tunnel) = self.egress.tunnels.open.remove(&id) {
            tunnel.close(&self.poller);
            self.session.abort_out(id);
        }
    }

    /// The host's side is gone: so is the connection.
    pub(crate) fn cut(&mut self, id: u32) {
        if let Some(tunnel) = self.egress.tunnels.open.remove(&id) {
            tunnel.reset(&self.poller);
        }
    }
}
