//! Kernel launches.
#![expect(unsafe_code, reason = "exports entry points under their C names")]

use std::ffi::{c_int, c_uint};

use crate::abi::{Code, Handle, LaunchConfig, LaunchParams, Opaque, Out};
use crate::driver::Driver;
use crate::gate::{entry, hot, streamed};

impl Driver {
    fn launch(
        &mut self,
        function: Handle,
        grid: [c_uint; 3],
        block: [c_uint; 3],
        stream: Handle,
    ) -> Result<(), Code> {
        let target = self.target(stream)?;
        let ns = self.launch_time(function, grid, block)?;
        if let Some(capture) = target.capture {
            return self.capture_kernel(capture, ns);
        }
        self.submit(&target, ns);
        Ok(())
    }

    fn launch_ex(&mut self, config: Out<LaunchConfig>, function: Handle) -> Result<(), Code> {
        let config = config.get()?;
        self.launch(function, config.grid, config.block, config.stream)
    }
}

hot! {
    fn cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared: c_uint, stream: Handle, _arguments: Opaque, _extra: Opaque,
    ) quick { Some(0) } |driver| {
        driver.launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], stream)
    }

    fn cuLaunchKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared: c_uint, stream: Handle, _arguments: Opaque, _extra: Opaque,
    ) quick { Some(0) } |driver| {
        driver.launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], stream)
    }

    fn cuLaunchKernelEx(config: Out<LaunchConfig>, function: Handle, _arguments: Opaque, _extra: Opaque) quick {
        Some(0)
    } |driver| {
        driver.launch_ex(config, function)
    }

    fn cuLaunchKernelEx_ptsz(config: Out<LaunchConfig>, function: Handle, _arguments: Opaque, _extra: Opaque) quick {
        Some(0)
    } |driver| {
        driver.launch_ex(config, function)
    }
}

streamed! {
    fn cuLaunchCooperativeKernel / cuLaunchCooperativeKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, _shared: c_uint, stream: Handle, _arguments: Opaque,
    ) |driver, _| {
        driver.launch(function, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], stream)
    }
}

entry! {
    fn cuLaunchCooperativeKernelMultiDevice(list: Out<LaunchParams>, count: c_uint, _flags: c_uint) |driver| {
        for place in 0..count as usize {
            let one = list.get_at(place)?;
            driver.launch(one.function, one.grid, one.block, one.stream)?;
        }
        Ok(())
    }

    // The launches of the first interface: one thread block of the size that `cuFuncSetBlockShape` set, here 256.
    fn cuLaunch(function: Handle) |driver| {
        driver.launch(function, [1, 1, 1], [256, 1, 1], Handle(0))
    }

    fn cuLaunchGrid(function: Handle, width: c_int, height: c_int) |driver| {
        driver.launch_old(function, width, height, Handle(0))
    }

    fn cuLaunchGridAsync(function: Handle, width: c_int, height: c_int, stream: Handle) |driver| {
        driver.launch_old(function, width, height, stream)
    }
}

impl Driver {
    fn launch_old(
        &mut self,
        function: Handle,
        width: c_int,
        height: c_int,
        stream: Handle,
    ) -> Result<(), Code> {
        let side = |v| c_uint::try_from(v).map_err(|_| Code::INVALID_VALUE);
        self.launch(function, [side(width)?, side(height)?, 1], [256, 1, 1], stream)
    }
}
