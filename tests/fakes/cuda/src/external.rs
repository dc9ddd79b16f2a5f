//! Memory of others: IPC handles and external memory. It has its owner's place on the card; opening it takes addresses alone.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::c_uint;

use crate::abi::{Bytes64, Code, DevicePtr, ExternalBuffer, ExternalMemory, Handle, Out};
use crate::driver::Driver;
use crate::gate::entry;
use crate::memory::{Backing, Kind};
use crate::space::{BLOCK, round_up};

const MAGIC: u64 = u64::from_le_bytes(*b"FAKE-IPC");

impl Driver {
    fn open_ipc(&mut self, out: Out<DevicePtr>, handle: &Bytes64) -> Result<(), Code> {
        out.check()?;
        let context = crate::context::current()?;
        let [magic, pid, address, size] = crate::share::read_words(handle);
        if magic != MAGIC {
            return Err(Code::INVALID_VALUE);
        }
        // A process cannot open its own handle.
        if pid == u64::from(std::process::id()) {
            return Err(Code::INVALID_CONTEXT);
        }
        // A second opening gives the same address.
        if let Some(known) = self.objects.opened.get(&(pid, address)).copied() {
            if let Some(users) = self.objects.opened_users.get_mut(&known) {
                *users += 1;
            }
            return out.put(known);
        }
        let length = round_up(size, BLOCK);
        let local = self.space.take(length, BLOCK)?;
        self.record(
            local,
            size,
            Backing::Addresses(length),
            context.ordinal,
            Some(self.owner(&context)),
            Kind::Opened,
        );
        self.objects.opened.insert((pid, address), local);
        self.objects.opened_users.insert(local, 1);
        out.put(local)
    }

    fn close_ipc(&mut self, address: DevicePtr) -> Result<(), Code> {
        let users = self.objects.opened_users.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
        *users -= 1;
        if *users == 0 {
            self.objects.opened_users.remove(&address);
            self.objects.opened.retain(|_, local| *local != address);
            if let Some(alloc) = self.allocs.remove(&address) {
                self.give_back(alloc.ordinal, address, alloc.backing);
            }
        }
        Ok(())
    }
}

entry! {
    fn cuIpcGetMemHandle(out: Out<Bytes64>, address: DevicePtr) |driver| {
        let (start, alloc) = driver.containing(address).ok_or(Code::INVALID_VALUE)?;
        if alloc.kind != Kind::Plain {
            return Err(Code::INVALID_VALUE);
        }
        out.put(crate::share::words(&[MAGIC, std::process::id().into(), start, alloc.size]))
    }

    fn cuIpcOpenMemHandle_v2(out: Out<DevicePtr>, handle: Bytes64, _flags: c_uint) |driver| {
        driver.open_ipc(out, &handle)
    }

    fn cuIpcOpenMemHandle(out: Out<DevicePtr>, handle: Bytes64, _flags: c_uint) |driver| {
        driver.open_ipc(out, &handle)
    }

    fn cuIpcCloseMemHandle(address: DevicePtr) |driver| {
        driver.close_ipc(address)
    }

    fn cuImportExternalMemory(out: Out<Handle>, description: Out<ExternalMemory>) |driver| {
        out.check()?;
        crate::context::current()?;
        let description = description.get()?;
        // 1 to 8: opaque descriptors to NvSciBuf.
        if !(1..=8).contains(&description.kind) || description.size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let handle = driver.handle();
        driver.objects.external.insert(handle, description.size);
        out.put(handle)
    }

    fn cuDestroyExternalMemory(memory: Handle) |driver| {
        driver.objects.external.remove(&memory).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    // Freed with cuMemFree.
    fn cuExternalMemoryGetMappedBuffer(out: Out<DevicePtr>, memory: Handle, buffer: Out<ExternalBuffer>) |driver| {
        out.check()?;
        let context = crate::context::current()?;
        let buffer = buffer.get()?;
        let size = *driver.objects.external.get(&memory).ok_or(Code::INVALID_HANDLE)?;
        if buffer.size == 0 || buffer.offset.checked_add(buffer.size).is_none_or(|end| end > size) {
            return Err(Code::INVALID_VALUE);
        }
        let length = round_up(buffer.size, BLOCK);
        let address = driver.space.take(length, BLOCK)?;
        let backing = Backing::Addresses(length);
        driver.record(address, buffer.size, backing, context.ordinal, Some(driver.owner(&context)), Kind::External);
        out.put(address)
    }
}
