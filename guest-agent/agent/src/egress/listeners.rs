//! Addresses in the guest where connections begin, and how many there may be.

use super::{LISTENER, RESOLVER};
use crate::poller::{Want, Watched};
use crate::serve::Agent;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

pub const RESOLVER_ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(127, 127, 0, 53), 53);
pub const SLOT_MAX: u8 = 63;
const BACKLOG: i32 = 1_024;
const ACCEPTS_PER_TURN: usize = 32;
/// The agent may hold 8,192 descriptors; commands and tunnels need theirs.
const LISTENERS_MAX: usize = 4_096;
/// How long to wait when descriptors ran out.
const REST: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Slot(u8),
    /// The number of a name, and a port.
    Name(u16, u16),
    Resolver,
}

struct Listener {
    socket: Watched,
    place: Place,
}

#[derive(Default)]
pub struct Listeners {
    all: Vec<Listener>,
    by_place: BTreeMap<Place, usize>,
    /// Those that had a client while there was no room for one.
    full: Vec<usize>,
    rests_until: Option<Instant>,
}

impl Listeners {
    pub fn due(&self) -> Option<Instant> {
        self.rests_until
    }
}

fn slot_address(slot: u8, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::new(127, 127, 0, 1 + slot), port)
}

/// Without SO_REUSEADDR: nobody else may listen beside us.
fn socket(address: SocketAddrV4, kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::INET, kind, flags, None)?;
    net::bind(&socket, &address)?;
    Ok(socket)
}

impl Agent {
    /// For `bind`: what did not work. A second time (after a restore) only what is missing is opened.
    pub(crate) fn start_egress(&mut self, proxy_port: u16) -> Vec<String> {
        if !self.egress.allowed {
            return Vec::new();
        }
        let port = *self.egress.proxy_port.get_or_insert(proxy_port);
        let mut warnings = Vec::new();
        let mut note = |address: SocketAddrV4, result: io::Result<()>| {
            if let Err(error) = result {
                warnings.push(format!("{address}: {error}"));
            }
        };
        note(RESOLVER_ADDRESS, self.open_resolver());
        note(RESOLVER_ADDRESS, self.listen(Place::Resolver, RESOLVER_ADDRESS));
        note(slot_address(0, port), self.listen(Place::Slot(0), slot_address(0, port)));
        warnings
    }

    fn open_resolver(&mut self) -> io::Result<()> {
        if self.egress.resolver.datagrams.is_none() {
            let socket = socket(RESOLVER_ADDRESS, SocketType::DGRAM)?;
            let mut datagrams = Watched::new(socket, Want::Read, RESOLVER);
            datagrams.arm(&self.poller, true);
            self.egress.resolver.datagrams = Some(datagrams);
        }
        Ok(())
    }

    /// A command's own proxy address. If it cannot be had, the command finds nobody there: nothing gets out.
    pub(crate) fn open_slot(&mut self, slot: u8) {
        if let Some(port) = self.egress.proxy_port.filter(|_| slot <= SLOT_MAX) {
            let _ = self.listen(Place::Slot(slot), slot_address(slot, port));
        }
    }

    /// Listens there, if it does not already.
    pub(crate) fn listen(&mut self, place: Place, address: SocketAddrV4) -> io::Result<()> {
        let listeners = &mut self.egress.listeners;
        if listeners.by_place.contains_key(&place) {
            return Ok(());
        }
        if listeners.all.len() >= LISTENERS_MAX {
            return Err(Errno::MFILE.into());
        }
        let socket = socket(address, SocketType::STREAM)?;
        net::listen(&socket, BACKLOG)?;
        let index = listeners.all.len();
        let mut socket = Watched::new(socket, Want::Read, LISTENER | index as u64);
        socket.arm(&self.poller, true);
        listeners.all.push(Listener { socket, place });
        listeners.by_place.insert(place, index);
        Ok(())
    }

    pub(crate) fn on_listener(&mut self, index: usize) {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = self.egress.listeners.all.get(index) else { return };
            let place = listener.place;
            if place != Place::Resolver && !self.has_room_for_a_tunnel() {
                return self.stop_accepting(index);
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match net::accept_with(&listener.socket.fd, flags) {
                Ok(socket) => match place {
                    Place::Resolver => self.admit_asker(socket),
                    place => self.admit_tunnel(socket, place),
                },
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.egress.listeners.rests_until = Some(Instant::now() + REST);
                    return self.stop_accepting(index);
                }
            }
        }
    }

    fn stop_accepting(&mut self, index: usize) {
        let listeners = &mut self.egress.listeners;
        listeners.all[index].socket.arm(&self.poller, false);
        listeners.full.push(index);
    }

    /// Clients that wait are taken as soon as there is room.
    pub(crate) fn accept_again(&mut self) {
        if self.egress.listeners.full.is_empty() || !self.has_room_for_a_tunnel() {
            return;
        }
        let listeners = &mut self.egress.listeners;
        if listeners.rests_until.is_some_and(|until| until > Instant::now()) {
            return;
        }
        listeners.rests_until = None;
        for index in std::mem::take(&mut listeners.full) {
            listeners.all[index].socket.arm(&self.poller, true);
        }
    }
}
