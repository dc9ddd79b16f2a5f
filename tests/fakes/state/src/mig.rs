//! MIG as the driver does it: profile tables, and what create, destroy and a mode change do to a card.

use crate::state::named_uuid;
use crate::tables::TABLES;
use crate::{Card, ComputeInstance, GpuInstance, Placement};

/// Highest GPU instance id: the driver has capability files for 0 to 14.
const LAST_GPU_INSTANCE: u32 = 14;

/// `NVML_DEVICE_ARCH_HOPPER`; from here on a mode change needs no reset.
const HOPPER: u32 = 9;

/// Why the driver refuses, as the `nvmlReturn_t` that it gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// 2: a profile or placement that the card does not have.
    InvalidArgument,
    /// 3: not a MIG card, or MIG is off.
    NotSupported,
    /// 6: no such instance.
    NotFound,
    /// 16: done only after a reset.
    ResetRequired,
    /// 19: something still uses it.
    InUse,
    /// 23: no place left.
    InsufficientResources,
}

impl Refusal {
    /// `nvmlReturn_t`.
    #[must_use]
    pub fn code(self) -> u32 {
        match self {
            Self::InvalidArgument => 2,
            Self::NotSupported => 3,
            Self::NotFound => 6,
            Self::ResetRequired => 16,
            Self::InUse => 19,
            Self::InsufficientResources => 23,
        }
    }
}

/// Engines of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engines {
    /// Copy engines.
    pub copy: u32,
    /// NVDEC.
    pub decoder: u32,
    /// NVENC.
    pub encoder: u32,
    /// NVJPG.
    pub jpeg: u32,
    /// Optical flow.
    pub ofa: u32,
}

impl Engines {
    fn list(self) -> [u32; 5] {
        [self.copy, self.decoder, self.encoder, self.jpeg, self.ofa]
    }
}

/// A GPU instance profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// `NVML_GPU_INSTANCE_PROFILE_*`, what the info call takes.
    pub enum_value: u32,
    /// `info.id`, what create takes; not the enum.
    pub id: u32,
    /// As `nvidia-smi mig -lgip` prints it, without its leading `MIG `.
    pub name: &'static str,
    /// Compute slices.
    pub slices: u32,
    /// Units on the grid.
    pub size: u32,
    /// Legal first units.
    pub starts: &'static [u32],
    /// Most at once on an empty card.
    pub max: u32,
    /// Memory.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Engines.
    pub engines: Engines,
    /// Whether it can do graphics (`+gfx`).
    pub graphics: bool,
    /// Its compute instance profiles; the last is the whole instance.
    pub compute: &'static [ComputeProfile],
}

/// A compute instance profile of one GPU instance profile.
#[derive(Debug, PartialEq, Eq)]
pub struct ComputeProfile {
    /// `NVML_COMPUTE_INSTANCE_PROFILE_*`.
    pub enum_value: u32,
    /// `info.id`.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// Most at once in one GPU instance.
    pub max: u32,
}

impl Profile {
    /// Where it may be made on an empty card.
    pub fn placements(&self) -> impl Iterator<Item = Placement> {
        self.starts.iter().map(|&start| Placement { start, size: self.size })
    }

    /// The compute profile with that id.
    #[must_use]
    pub fn compute_profile(&self, id: u32) -> Option<&'static ComputeProfile> {
        self.compute.iter().find(|c| c.id == id)
    }

    /// Streaming multiprocessors of a compute instance of `slices`.
    #[must_use]
    pub fn compute_sms(&self, slices: u32) -> u32 {
        self.sms * slices / self.slices
    }
}

/// The profiles of one card model under one driver.
#[derive(Debug, PartialEq, Eq)]
pub struct Table {
    /// Name in [`crate::Mig::table`].
    pub name: &'static str,
    /// Profiles, smallest first.
    pub rows: &'static [Profile],
}

impl Table {
    /// The profile with that `info.id`.
    #[must_use]
    pub fn by_id(&self, id: u32) -> Option<&'static Profile> {
        self.rows.iter().find(|p| p.id == id)
    }

    /// The profile with that enum value.
    #[must_use]
    pub fn by_enum(&self, value: u32) -> Option<&'static Profile> {
        self.rows.iter().find(|p| p.enum_value == value)
    }

    /// Most MIG devices on one card.
    #[must_use]
    pub fn max_devices(&self) -> u32 {
        self.rows.iter().map(|p| p.max).max().unwrap_or(0)
    }

    /// Engines of the whole card: the most that one profile has of each.
    fn engines(&self) -> [u32; 5] {
        self.rows
            .iter()
            .map(|p| p.engines.list())
            .fold([0; 5], |most, of| std::array::from_fn(|i| most[i].max(of[i])))
    }
}

/// The table of that name; none for a card without MIG.
#[must_use]
pub fn table(name: &str) -> Option<&'static Table> {
    TABLES.iter().find(|t| t.name == name)
}

impl Card {
    /// Its profile table.
    ///
    /// # Errors
    /// [`Refusal::NotSupported`] when the card does not know MIG.
    pub fn mig_table(&self) -> Result<&'static Table, Refusal> {
        table(&self.mig.table).filter(|_| self.mig.capable).ok_or(Refusal::NotSupported)
    }

    /// Its profile table while MIG is on.
    ///
    /// # Errors
    /// [`Refusal::NotSupported`] when MIG is off or unknown.
    pub fn active_table(&self) -> Result<&'static Table, Refusal> {
        self.mig_table().and_then(|t| self.mig.current.then_some(t).ok_or(Refusal::NotSupported))
    }

    /// The GPU instance of that id.
    #[must_use]
    pub fn gpu_instance(&self, id: u32) -> Option<&GpuInstance> {
        self.mig.instances.iter().find(|g| g.id == id)
    }

    /// Placements of a profile that are free now, engines included; lowest first.
    #[must_use]
    pub fn free_placements(&self, table: &Table, profile: &Profile) -> Vec<Placement> {
        let live: Vec<&Profile> =
            self.mig.instances.iter().filter_map(|g| table.by_id(g.profile_id)).collect();
        let engines_left = (0..5).all(|e| {
            let used: u32 = live.iter().map(|p| p.engines.list()[e]).sum();
            used + profile.engines.list()[e] <= table.engines()[e]
        });
        let free = |p: &Placement| !self.mig.instances.iter().any(|g| g.placement.overlaps(*p));
        profile.placements().filter(|p| engines_left && free(p)).collect()
    }

    /// How many more instances of a profile fit beside what is there.
    #[must_use]
    pub fn remaining(&self, table: &'static Table, profile: &'static Profile) -> u32 {
        let mut trial = self.clone();
        let mut count = 0;
        while trial.create_gpu_instance_in(table, profile, None).is_ok() {
            count += 1;
        }
        count
    }

    /// Makes a GPU instance: at `placement`, or at the highest free one as the driver does by itself.
    ///
    /// # Errors
    /// A [`Refusal`] as the driver gives it: an illegal placement is `InvalidArgument`, a taken one
    /// `InsufficientResources`.
    pub fn create_gpu_instance(
        &mut self,
        profile_id: u32,
        placement: Option<Placement>,
    ) -> Result<u32, Refusal> {
        let table = self.active_table()?;
        let profile = table.by_id(profile_id).ok_or(Refusal::InvalidArgument)?;
        self.create_gpu_instance_in(table, profile, placement)
    }

    fn create_gpu_instance_in(
        &mut self,
        table: &Table,
        profile: &Profile,
        placement: Option<Placement>,
    ) -> Result<u32, Refusal> {
        let free = self.free_placements(table, profile);
        let placement = match placement {
            Some(p) if !profile.placements().any(|legal| legal == p) => return Err(Refusal::InvalidArgument),
            Some(p) => free.into_iter().find(|f| *f == p),
            None => free.into_iter().next_back(),
        };
        let placement = placement.ok_or(Refusal::InsufficientResources)?;
        let last = self.mig.last_id;
        let id = (1..=LAST_GPU_INSTANCE)
            .map(|step| (last + step - 1) % LAST_GPU_INSTANCE + 1)
            .find(|id| self.gpu_instance(*id).is_none())
            .ok_or(Refusal::InsufficientResources)?;
        self.mig.last_id = id;
        self.mig.instances.push(GpuInstance { id, profile_id: profile.id, placement, compute: vec![] });
        self.mig.instances.sort_by_key(|g| g.id);
        Ok(id)
    }

    /// Destroys a GPU instance.
    ///
    /// # Errors
    /// `NotSupported` with MIG off, `NotFound`, `InUse` while it has compute instances or processes.
    pub fn destroy_gpu_instance(&mut self, id: u32) -> Result<(), Refusal> {
        self.active_table()?;
        let instance = self.gpu_instance(id).ok_or(Refusal::NotFound)?;
        if !instance.compute.is_empty() || self.has_process_in(id) {
            return Err(Refusal::InUse);
        }
        self.mig.instances.retain(|g| g.id != id);
        Ok(())
    }

    /// Compute profile of a live GPU instance and how many more of it fit.
    ///
    /// # Errors
    /// `NotSupported` with MIG off, `NotFound` for the instance, `InvalidArgument` for the profile.
    pub fn compute_remaining(
        &self,
        gpu_instance: u32,
        profile_id: u32,
    ) -> Result<(&'static ComputeProfile, u32), Refusal> {
        let table = self.active_table()?;
        let instance = self.gpu_instance(gpu_instance).ok_or(Refusal::NotFound)?;
        let profile = table.by_id(instance.profile_id).ok_or(Refusal::NotFound)?;
        let compute = profile.compute_profile(profile_id).ok_or(Refusal::InvalidArgument)?;
        let mut trial = instance.clone();
        let mut count = 0;
        while let Some(placement) = free_slices(profile, &trial, compute) {
            let id = trial.compute.len().try_into().unwrap_or(u32::MAX);
            let (uuid, slot) = (String::new(), 0);
            trial.compute.push(ComputeInstance { id, profile_id, placement, uuid, slot });
            count += 1;
        }
        Ok((compute, count))
    }

    /// Makes a compute instance, and with it a MIG device, at the lowest free slices.
    ///
    /// # Errors
    /// As [`Self::compute_remaining`], and `InsufficientResources` when none fits.
    pub fn create_compute_instance(&mut self, gpu_instance: u32, profile_id: u32) -> Result<u32, Refusal> {
        self.create_compute_instance_at(gpu_instance, profile_id, None)
    }

    /// Makes a compute instance at these slices, or at the lowest free ones.
    ///
    /// # Errors
    /// As [`Self::create_compute_instance`], and `InvalidArgument` for slices outside the instance.
    pub fn create_compute_instance_at(
        &mut self,
        gpu_instance: u32,
        profile_id: u32,
        placement: Option<Placement>,
    ) -> Result<u32, Refusal> {
        let table = self.active_table()?;
        let (compute, _) = self.compute_remaining(gpu_instance, profile_id)?;
        let slots: Vec<u32> = self.mig.instances.iter().flat_map(|g| &g.compute).map(|c| c.slot).collect();
        let slot = (0..=u32::MAX).find(|s| !slots.contains(s)).unwrap_or(u32::MAX);
        let card = self.uuid.clone();
        let instance =
            self.mig.instances.iter_mut().find(|g| g.id == gpu_instance).ok_or(Refusal::NotFound)?;
        let profile = table.by_id(instance.profile_id).ok_or(Refusal::NotFound)?;
        let fits = free_slices(profile, instance, compute);
        let placement = match placement {
            None => fits,
            Some(p) if p.size != compute.slices || p.start.saturating_add(p.size) > profile.slices => {
                return Err(Refusal::InvalidArgument);
            }
            Some(p) => fits.filter(|_| !instance.compute.iter().any(|c| c.placement.overlaps(p))).map(|_| p),
        };
        let placement = placement.ok_or(Refusal::InsufficientResources)?;
        let id = (0..=u32::MAX).find(|id| !instance.compute.iter().any(|c| c.id == *id)).unwrap_or(u32::MAX);
        let uuid = format!("MIG-{}", named_uuid(&format!("{id}.{gpu_instance}.{card}")));
        instance.compute.push(ComputeInstance { id, profile_id, placement, uuid, slot });
        instance.compute.sort_by_key(|c| c.id);
        Ok(id)
    }

    /// Destroys a compute instance.
    ///
    /// # Errors
    /// `NotSupported` with MIG off, `NotFound`, `InUse` while a process runs in its GPU instance.
    pub fn destroy_compute_instance(&mut self, gpu_instance: u32, id: u32) -> Result<(), Refusal> {
        self.active_table()?;
        let known = self.gpu_instance(gpu_instance).is_some_and(|g| g.compute.iter().any(|c| c.id == id));
        if !known {
            return Err(Refusal::NotFound);
        }
        if self.has_process_in(gpu_instance) {
            return Err(Refusal::InUse);
        }
        for g in self.mig.instances.iter_mut().filter(|g| g.id == gpu_instance) {
            g.compute.retain(|c| c.id != id);
        }
        Ok(())
    }

    /// Asks for MIG on or off. The answer is the activation status: none when the mode is active now.
    ///
    /// # Errors
    /// The outer error is the call's (`NotSupported`), the inner one the activation status:
    /// `InUse` with processes or instances on the card, `ResetRequired` before Hopper.
    pub fn set_mig_mode(&mut self, on: bool) -> Result<Result<(), Refusal>, Refusal> {
        self.mig_table()?;
        self.mig.pending = on;
        if on == self.mig.current {
            return Ok(Ok(()));
        }
        if !self.processes.is_empty() || !self.mig.instances.is_empty() {
            return Ok(Err(Refusal::InUse));
        }
        if self.architecture < HOPPER {
            return Ok(Err(Refusal::ResetRequired));
        }
        self.activate_mode();
        Ok(Ok(()))
    }

    /// What a reset does: the pending mode becomes the mode, instances never survive.
    pub fn reset(&mut self) {
        self.mig.instances.clear();
        self.activate_mode();
    }

    /// Makes a pending mode the mode; a card whose mode does not change keeps its instances.
    pub(crate) fn activate_mode(&mut self) {
        if self.mig.current != self.mig.pending {
            self.mig.instances.clear();
            self.mig.current = self.mig.pending;
        }
    }

    fn has_process_in(&self, gpu_instance: u32) -> bool {
        self.processes.iter().any(|p| p.gpu_instance == Some(gpu_instance))
    }
}

/// Lowest free slices for one more compute instance.
fn free_slices(profile: &Profile, instance: &GpuInstance, compute: &ComputeProfile) -> Option<Placement> {
    let same = instance.compute.iter().filter(|c| c.profile_id == compute.id).count();
    if same >= compute.max as usize {
        return None;
    }
    (0..=profile.slices.checked_sub(compute.slices)?)
        .map(|start| Placement { start, size: compute.slices })
        .find(|p| !instance.compute.iter().any(|c| c.placement.overlaps(*p)))
}

#[cfg(test)]
mod tests;
