//! The agent as `/init` of a microVM's initramfs: devices, modules, root file system, carrier.
//!
//! The root is an EROFS image under a memory overlay; the initramfs stays below it, out of reach.

use crate::bind::mount;
use crate::carrier::Carrier;
use crate::poller::check;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

const CARRIER_DEFAULT: &str = "/dev/vport0p1";
const DEVICE_PATIENCE: Duration = Duration::from_secs(5);
const DEVICE_POLL: Duration = Duration::from_millis(2);
const NEW_ROOT: &str = "/newroot";

/// True for the kernel's own first process. /proc is not there yet to ask for more.
pub fn is_init(arguments: &[String]) -> bool {
    let named = arguments.first().is_some_and(|name| name == "/init");
    std::process::id() == 1 && named
}

fn option(key: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    line.split_whitespace().find_map(|word| Some(word.strip_prefix(key)?.strip_prefix('=')?.to_string()))
}

fn message(what: &str) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("{what}: {error}")
}

/// From the kernel's first process to a root file system and an open carrier.
pub fn prepare() -> Result<Carrier, String> {
    kernel_file_systems()?;
    load_modules()?;
    if option("cloche.root").as_deref() != Some("none") {
        enter_root()?;
    }
    for (kind, target, data) in [
        ("devpts", "/dev/pts", "mode=0620,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", "mode=1777"),
        ("tmpfs", "/tmp", "mode=1777"),
    ] {
        // An image may lack the mount point and be none the worse until a command wants it.
        let _ = fs::create_dir_all(target);
        let _ = mount(
            kind,
            target,
            kind,
            libc::MS_NOSUID | if target == "/tmp" { libc::MS_NODEV } else { 0 },
            data,
        );
    }
    protect_kernel_files()?;
    loopback_up();
    let path = option("cloche.carrier").unwrap_or_else(|| CARRIER_DEFAULT.into());
    patiently(|| Carrier::open(&path)).map_err(message(&path))
}

fn kernel_file_systems() -> Result<(), String> {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        // Exists already in most archives.
        let _ = fs::create_dir(target);
        match mount(
            kind,
            target,
            kind,
            libc::MS_NOSUID | if kind == "devtmpfs" { 0 } else { libc::MS_NODEV },
            "",
        ) {
            Err(error) if error.raw_os_error() != Some(libc::EBUSY) => return Err(message(target)(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Root without capabilities still owns these files: `core_pattern` alone would give it all of them back.
fn protect_kernel_files() -> Result<(), String> {
    let read_only = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
    for path in ["/sys", "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"] {
        // A kernel may be built without some of them.
        if fs::exists(path).unwrap_or(false) {
            mount(path, path, "", libc::MS_BIND, "").map_err(message(path))?;
            mount("", path, "", read_only, "").map_err(message(path))?;
        }
    }
    Ok(())
}

/// `/mod/order` names the files to load, one a line; a kernel without modules has no such file.
fn load_modules() -> Result<(), String> {
    let Ok(order) = fs::read_to_string("/mod/order") else { return Ok(()) };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        let file = fs::File::open(format!("/mod/{name}")).map_err(message(name))?;
        // SAFETY: a descriptor, an empty NUL-terminated text, no flags.
        let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        match check(result as i32) {
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => return Err(message(name)(error)),
            _ => {}
        }
    }
    Ok(())
}

fn enter_root() -> Result<(), String> {
    for folder in ["/ro", "/rw", NEW_ROOT] {
        fs::create_dir_all(folder).map_err(message(folder))?;
    }
    patiently(|| mount("/dev/vda", "/ro", "erofs", libc::MS_RDONLY, "")).map_err(message("/dev/vda"))?;
    let size = option("cloche.layer_bytes").map_or(String::new(), |bytes| format!(",size={bytes}"));
    mount("tmpfs", "/rw", "tmpfs", 0, &format!("mode=0755{size}")).map_err(message("/rw"))?;
    for folder in ["/rw/upper", "/rw/work"] {
        fs::create_dir(folder).map_err(message(folder))?;
    }
    let layers = "lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work";
    mount("overlay", NEW_ROOT, "overlay", libc::MS_NOSUID | libc::MS_NODEV, layers)
        .map_err(message("overlay"))?;
    for folder in ["/dev", "/proc", "/sys"] {
        let target = format!("{NEW_ROOT}{folder}");
        let _ = fs::create_dir(&target);
        mount(folder, &target, "", libc::MS_MOVE, "").map_err(message(&target))?;
    }
    std::env::set_current_dir(NEW_ROOT).map_err(message(NEW_ROOT))?;
    mount(".", "/", "", libc::MS_MOVE, "").map_err(message("move the root"))?;
    std::os::unix::fs::chroot(".").map_err(message("chroot"))?;
    std::env::set_current_dir("/").map_err(message("/"))
}

/// A machine without a network still has 127.0.0.1.
fn loopback_up() {
    // SAFETY: a zeroed ifreq with a name; both calls only read it. A failure shows at the first connect.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return;
        }
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as _;
        request.ifr_name[1] = b'o' as _;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as _;
        libc::ioctl(socket, libc::SIOCSIFFLAGS as _, &request);
        libc::close(socket);
    }
}

/// Devices appear a moment after their driver.
fn patiently<T>(attempt: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + DEVICE_PATIENCE;
    loop {
        match attempt() {
            Err(_) if Instant::now() < until => std::thread::sleep(DEVICE_POLL),
            result => return result,
        }
    }
}

/// There is no power switch without ACPI: a reboot ends the machine (`-no-reboot`).
pub fn power_off() -> ! {
    // SAFETY: no pointers; PID 1 must not return.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_AUTOBOOT);
    }
    loop {
        std::thread::park();
    }
}
