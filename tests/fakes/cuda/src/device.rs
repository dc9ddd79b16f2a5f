//! Devices.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_char, c_int, c_uint};

use crate::abi::{Code, Device, DeviceProperties, Opaque, Out, Text, Uuid};
use crate::driver::Driver;
use crate::gate::entry;

entry! {
    fn cuDeviceGetCount(count: Out<c_int>) |driver| {
        count.put(c_int::try_from(driver.cards.len()).unwrap_or(0))
    }

    fn cuDeviceGet(device: Out<Device>, ordinal: c_int) |driver| {
        driver.ordinal(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        name.put_text(length, &driver.cards[ordinal].name)
    }

    fn cuDeviceGetUuid(uuid: Out<Uuid>, device: Device) |driver| {
        put_uuid(driver, uuid, device)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<Uuid>, device: Device) |driver| {
        put_uuid(driver, uuid, device)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        bytes.put(usize::try_from(driver.cards[ordinal].memory).unwrap_or(usize::MAX))
    }

    // The first version had 32 bits.
    fn cuDeviceTotalMem(bytes: Out<c_uint>, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        bytes.put(c_uint::try_from(driver.cards[ordinal].memory).unwrap_or(c_uint::MAX))
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        value.put(driver.attribute(ordinal, attribute)?)
    }

    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        let (high, low) = driver.cards[ordinal].compute;
        major.put(high)?;
        minor.put(low)
    }

    fn cuDeviceGetProperties(properties: Out<DeviceProperties>, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        let asked = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14];
        let mut values = [0; 14];
        for (value, attribute) in values.iter_mut().zip(asked) {
            *value = driver.attribute(ordinal, attribute)?;
        }
        properties.put(DeviceProperties { values })
    }

    fn cuDeviceGetByPCIBusId(device: Out<Device>, bus: Text) |driver| {
        let wanted = bus.read()?.to_ascii_uppercase();
        let short = |text: &str| text.to_ascii_uppercase().trim_start_matches("0000").to_owned();
        let found = driver.cards.iter().position(|c| short(&c.bus) == short(&wanted));
        device.put(found.and_then(|o| Device::try_from(o).ok()).ok_or(Code::INVALID_VALUE)?)
    }

    // Four digits of the domain, where NVML has eight.
    fn cuDeviceGetPCIBusId(bus: Out<c_char>, length: c_int, device: Device) |driver| {
        let ordinal = driver.ordinal(device)?;
        let text = &driver.cards[ordinal].bus;
        bus.put_text(length, text.get(4..).unwrap_or(text))
    }

    fn cuDeviceGetLuid(_luid: Out<c_char>, _mask: Out<c_uint>, _device: Device) |_| {
        Err(Code::NOT_SUPPORTED)
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(
        width: Out<usize>, _format: c_uint, _channels: c_uint, device: Device,
    ) |driver| {
        driver.ordinal(device)?;
        width.put(1 << 28)
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: Device, peer: Device) |driver| {
        driver.ordinal(device)?;
        driver.ordinal(peer)?;
        can.put((device != peer).into())
    }

    fn cuDeviceGetP2PAttribute(value: Out<c_int>, _attribute: c_uint, from: Device, to: Device) |driver| {
        driver.ordinal(from)?;
        driver.ordinal(to)?;
        if from == to { Err(Code::INVALID_DEVICE) } else { value.put(1) }
    }

    fn cuDeviceGetExecAffinitySupport(value: Out<c_int>, _kind: c_uint, device: Device) |driver| {
        driver.ordinal(device)?;
        value.put(1)
    }

    fn cuCtxEnablePeerAccess(peer: crate::abi::Handle, flags: c_uint) |driver| {
        crate::context::current()?;
        driver.contexts.get(&peer).ok_or(Code::INVALID_CONTEXT)?;
        if flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuCtxDisablePeerAccess(peer: crate::abi::Handle) |driver| {
        driver.contexts.get(&peer).map(|_| ()).ok_or(Code::INVALID_CONTEXT)
    }

    // Nobody profiles simulated cards.
    fn cuProfilerStart() |_| {
        crate::context::current().map(|_| ())
    }

    fn cuProfilerStop() |_| {
        crate::context::current().map(|_| ())
    }

    fn cuDeviceGetNvSciSyncAttributes(_list: Opaque, _device: Device, _flags: c_int) |_| {
        Err(Code::NOT_SUPPORTED)
    }
}

fn put_uuid(driver: &Driver, uuid: Out<Uuid>, device: Device) -> Result<(), Code> {
    let ordinal = driver.ordinal(device)?;
    uuid.put(Uuid { bytes: driver.cards[ordinal].uuid })
}

impl Driver {
    /// `CUdevice_attribute` as an H100 answers them, with the card's own numbers; unknown ones up to 150 are 0.
    fn attribute(&self, ordinal: usize, attribute: c_uint) -> Result<c_int, Code> {
        let card = &self.cards[ordinal];
        let bus = |range: std::ops::Range<usize>| {
            card.bus.get(range).and_then(|d| c_int::from_str_radix(d, 16).ok()).unwrap_or(0)
        };
        Ok(match attribute {
            // Most threads of a block and its first two sides; shared memory that the driver keeps.
            1..=3 | 111 => 1024,
            4 => 64,
            5 | 11 => c_int::MAX,
            6 | 7 => 65535,
            // Shared memory, constant memory and registers, warp and blocks per SM, clock, texture alignment.
            8 => 49152,
            9 | 12 | 82 => 65536,
            10 | 51 | 106 => 32,
            13 => 1_980_000,
            14 => 512,
            // What the card can: overlap, host mapping, surfaces, concurrent kernels, ECC, unified addressing, stream priorities,
            // caches, managed memory, preemption, cooperative launch, remote flush, host registration, virtual memory and its POSIX
            // handles, RDMA, sparse arrays, pools and their handle types, clusters, 64-bit stream operations, dma-buf, IPC events,
            // tensor maps, multicast.
            15
            | 19
            | 31
            | 32
            | 41
            | 78..=80
            | 83
            | 89..=91
            | 95
            | 98
            | 99
            | 102
            | 103
            | 110
            | 112
            | 115
            | 116
            | 119..=125
            | 127
            | 129
            | 132 => 1,
            16 => c_int::try_from(card.sms).unwrap_or(c_int::MAX),
            21 | 22 => 131_072,
            23..=25 => 16384,
            33 => bus(9..11),
            34 => bus(12..14),
            36 => 2_619_000,
            37 => 5120,
            38 => 52_428_800,
            39 => 2048,
            40 => 3,
            50 => bus(0..8),
            75 => card.compute.0,
            76 => card.compute.1,
            81 => 233_472,
            97 => 232_448,
            118 => 100,
            126 => 4,
            134 => card.numa.and_then(|n| c_int::try_from(n).ok()).unwrap_or(-1),
            // A number that no header of 12.9 to 13.5 has.
            0 | 161.. => return Err(Code::INVALID_VALUE),
            _ => 0,
        })
    }
}
