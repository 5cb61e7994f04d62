//! `port.connect`: a TCP connection to something that listens in the guest.

use crate::failure::{Failure, Outcome};
use crate::json::Object;
use crate::operation::{token, Operation, Port, Role, Task};
use crate::poller::{Want, Watched};
use crate::serve::{ok, Agent};
use crate::wire;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

/// A connection begun; the descriptor becomes writable when it is made or refused.
fn dial(address: SocketAddr) -> Outcome<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket =
        net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(Failure::os(&address.to_string(), error.raw_os_error())),
    }
}

pub fn start(stream: u32, ask: &wire::Port) -> Outcome<Operation> {
    let host = ask.host.as_deref().filter(|host| *host != "localhost").unwrap_or("127.0.0.1");
    let ip: IpAddr = host.parse().map_err(|_| Failure::invalid("host: an address, not a name"))?;
    let address = SocketAddr::new(ip, ask.port);
    let mut fallback = (host == "127.0.0.1").then(|| SocketAddr::new(Ipv6Addr::LOCALHOST.into(), ask.port));
    let socket = dial(address).or_else(|failure| dial(fallback.take().ok_or(failure)?))?;
    let operation = Operation::new(Task::Port(Port { connecting: true, fallback }));
    Ok(operation.takes(stream, socket))
}

impl Agent {
    /// The connection is made, or refused; or it goes on being tried.
    pub(crate) fn on_connect(&mut self, id: u32) {
        let Some(Operation { task: Task::Port(port), input: Some(input), .. }) = self.operations.get_mut(&id)
        else {
            return;
        };
        let result = match net::sockopt::socket_error(&input.fd) {
            Ok(result) => result,
            Err(errno) => Err(errno),
        };
        let outcome = match (result, port.fallback.take()) {
            (Ok(()), _) => input.fd.try_clone().map(|socket| (socket, false)).map_err(Failure::from),
            (Err(_), Some(next)) => dial(next).map(|socket| (socket, true)),
            (Err(error), None) => Err(Failure::os("connect", error.raw_os_error())),
        };
        match outcome {
            Ok((socket, true)) => {
                let next = Watched::new(socket, Want::Write, token(id, Role::Input));
                std::mem::replace(input, next).close(&self.poller);
                input.arm(&self.poller, true);
            }
            Ok((socket, false)) => {
                port.connecting = false;
                input.arm(&self.poller, false);
                // Small answers must not wait for more; refused: slower, not wrong.
                let _ = net::sockopt::set_tcp_nodelay(&socket, true);
                let operation = self.operations.remove(&id).expect("it was just here");
                let mut operation = operation.gives(id, id, Role::Output, socket);
                operation.outputs[0].bulk = true;
                self.session.opened(id, "{}".into());
                self.admit(id, operation);
            }
            Err(failure) => {
                self.session.end(id, failure.end());
                self.discard(id);
            }
        }
    }

    pub(crate) fn port_end(&self, id: u32) -> Vec<u8> {
        let (sent, received) = (self.session.input_bytes(id), self.session.output_bytes(id));
        ok(&Object::new().number("sent", sent).number("received", received).finish())
    }
}
