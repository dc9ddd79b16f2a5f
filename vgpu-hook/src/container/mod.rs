//! The container that this process belongs to: its control page, its usage file, its slot.
//!
//! Limits come from the control page that the node's agent mounts, read-only, at [`PAGE_PATH`]. Where it is not mounted
//! they may be given by hand, in the environment (`environment`), and the usage file is one of the user's own.
//! Where neither is there, the library keeps out of the way.
//!
//! A process attaches in `cuInit`: it maps both files and takes a slot. One that was forked from an attached process
//! attaches anew at its first call (`state`). What cannot be held to a limit that was asked for is not let at the
//! cards (`refusal`), unless the page says that this is only to be reported.
//!
//! A tenant can truncate its own usage file; the processes that have it mapped then die of SIGBUS. They are the tenant's
//! own, nobody else maps the file, and what they held is free again: so this needs no guard.

#![expect(unsafe_code, reason = "calls the driver, and keeps the container in memory of its own")]

mod environment;
mod fault;
mod file;
mod life;
mod ordinals;
mod peers;
mod refusal;
mod said;
mod slots;
mod state;
mod uuid;
mod words;

use core::ffi::CStr;
use core::sync::atomic::Ordering::{Acquire, Relaxed};

use mullion_accounting::Account;
use mullion_pace::policy::Policy;
use mullion_region::page::{Enforcement, PageSpec};
use mullion_region::{CardUuid, MAX_DEVICES, usage};

use crate::cuda::{CUdevice, CUresult};
use crate::driver;
use crate::memory::Books;
use crate::sys::{self, Fd};

use environment::{Settings, Variable};
pub(crate) use fault::point as fault_point;
use ordinals::Ordinals;
pub(crate) use peers::Peers;
pub(crate) use refusal::Notice;
use refusal::Refusal;
use slots::UsageFile;
pub(crate) use state::{Held, Lock, thread};
use state::{Phase, State};
pub(crate) use words::{CardWords, HamiTail, Page, PageCard};

/// Where the agent mounts the control page.
pub(crate) const PAGE_PATH: &str = "/usr/local/vgpu/control.page";
const PAGE: &CStr = c"/usr/local/vgpu/control.page";
/// Where the agent mounts the usage file.
const USAGE: &CStr = c"/usr/local/vgpu/usage.cache";
/// The usage file of limits given by hand, unless `CUDA_DEVICE_MEMORY_SHARED_CACHE` names another.
const USAGE_BY_HAND: &CStr = c"/tmp/cudevshr.cache";

/// One card's memory as this process sees it.
pub(crate) type Memory = Account<'static, fault::Word, fault::Mark>;

/// What is known of the container once the process is attached.
#[derive(Debug)]
pub(crate) struct Container {
    state: &'static State,
    file: &'static UsageFile,
    /// The page mounted, or this process's own where the limits were given by hand.
    pub(crate) page: &'static Page,
    /// Whether the limits were given by hand: there is no agent, and no heartbeat.
    pub(crate) by_hand: bool,
    /// What to do where a limit cannot be kept.
    enforcement: Enforcement,
    /// When the SM limit applies.
    pub(crate) policy: Policy,
    cards: [Option<Card>; MAX_DEVICES],
    ordinals: Ordinals,
    /// This process's slot; `None` for one that only looks.
    slot: Option<usize>,
    /// What this process has allocated.
    pub(crate) books: Books,
}

/// One card of the container.
#[derive(Debug)]
pub(crate) struct Card {
    /// Its place in both files.
    pub(crate) index: u8,
    uuid: CardUuid,
    /// The limit in bytes; `u64::MAX` = none.
    limit: u64,
    /// Claims and sums.
    pub(crate) memory: Memory,
    /// Counters, and the word of the launch bucket.
    pub(crate) words: &'static CardWords,
    /// Rate, scale and burst, which the agent changes.
    pub(crate) terms: &'static PageCard,
    file: &'static UsageFile,
}

/// How a call is to be treated.
#[derive(Debug)]
pub(crate) enum Gate {
    /// It goes to the driver as it is.
    Open,
    /// It is counted.
    Limited(&'static Container),
    /// It is answered with this.
    Refused(CUresult),
}

/// How a call that takes or gives memory, or puts work on a card, is to be treated.
#[inline]
pub(crate) fn gate() -> Gate {
    match attached() {
        Some(container) => Gate::Limited(container),
        None => gate_unattached(),
    }
}

#[inline]
fn attached() -> Option<&'static Container> {
    let container = state::get()?.container.load(Acquire);
    // SAFETY: null, or a container of this process, which is never freed.
    unsafe { container.as_ref() }
}

/// This process has no slot: it needs none, or is a forked child, or used a card in a way that passed by `cuInit`.
#[cold]
fn gate_unattached() -> Gate {
    let Ok(state) = state::make() else {
        return if wanted() { Gate::Refused(CUresult::OPERATING_SYSTEM) } else { Gate::Open };
    };
    match state.phase() {
        Phase::Open => Gate::Open,
        Phase::Refused => Gate::Refused(state.refused_with()),
        // The driver calls back while the process attaches.
        Phase::Busy if state.is_mine() => Gate::Open,
        Phase::New | Phase::Busy | Phase::Attached => enter(state),
    }
}

/// The container for a program that reads NVML: without a slot of its own where it has none.
pub(crate) fn for_nvml() -> Option<&'static Container> {
    let state = state::make().ok()?;
    if let Some(container) = attached() {
        return Some(container);
    }
    // SAFETY: null, or a container of this process, which is never freed.
    if let Some(view) = unsafe { state.view.load(Acquire).as_ref() } {
        return Some(view);
    }
    let view = look(state)?;
    // Of two threads at once one's work is left lying: a page or two.
    let _ = state.view.compare_exchange(core::ptr::null_mut(), view, Acquire, Relaxed);
    // SAFETY: as above.
    unsafe { state.view.load(Acquire).as_ref() }
}

/// `cuInit`.
///
/// # Safety
/// As `cuInit`.
pub(crate) unsafe fn init(real: unsafe extern "C" fn(u32) -> CUresult, flags: u32) -> CUresult {
    // SAFETY: the caller's own argument.
    let result = unsafe { real(flags) };
    if !result.is_ok() {
        return result;
    }
    let gate = match state::make() {
        Ok(state) if state.phase() == Phase::Refused => enter(state),
        Ok(_) => gate(),
        Err(refusal) if wanted() => {
            refusal.say("cuInit fails");
            Gate::Refused(refusal.result())
        }
        Err(_) => Gate::Open,
    };
    match gate {
        Gate::Refused(refused) => refused,
        Gate::Open | Gate::Limited(_) => result,
    }
}

/// Attaches, unless another thread has done so by then.
fn enter(state: &'static State) -> Gate {
    if let Some(turn) = state.begin() {
        let limits = Limits::find();
        match limits.and_then(|limits| attach(state, &limits)) {
            Ok(Some(container)) => turn.attached(container),
            Ok(None) => turn.open(),
            // The driver is not ready, and will say so itself: a child forked after cuInit, or a call before it.
            Err(Refusal::DriverSilent { result: CUresult::NOT_INITIALIZED, .. }) => {
                turn.give_up();
                return Gate::Open;
            }
            Err(refusal) if limits.is_ok_and(|limits| limits.only_reported()) => {
                refusal.say("the page says report: this process runs without a limit");
                turn.open();
            }
            Err(refusal) => {
                refusal.say("cuInit fails");
                turn.refused(refusal.result());
            }
        }
    }
    match (attached(), state.phase()) {
        (Some(container), _) => Gate::Limited(container),
        (None, Phase::Refused) => Gate::Refused(state.refused_with()),
        (None, _) => Gate::Open,
    }
}

/// Where this process's limits come from.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one, while the process attaches")]
enum Limits {
    /// Nobody set any.
    None,
    /// The agent.
    Mounted(&'static Page, PageSpec),
    /// The environment.
    ByHand(Settings),
}

impl Limits {
    fn find() -> Result<Self, Refusal> {
        if let Some((page, spec)) = file::open_page(PAGE)? {
            return Ok(Self::Mounted(page, spec));
        }
        let settings = environment::read(value_of).map_err(Refusal::Environment)?;
        Ok(if settings.any() { Self::ByHand(settings) } else { Self::None })
    }

    /// Whether what cannot be kept is let through.
    fn only_reported(&self) -> bool {
        matches!(self, Self::Mounted(_, PageSpec { enforcement: Enforcement::Report, .. }))
    }
}

/// Whether a limit is asked for that has to be kept.
fn wanted() -> bool {
    match Limits::find() {
        Ok(Limits::None) => false,
        Ok(limits) => !limits.only_reported(),
        Err(_) => true,
    }
}

/// Reads the environment.
fn value_of(variable: Variable) -> Option<&'static [u8]> {
    let mut name = environment::Name::default();
    Some(sys::environment(name.of(variable)?)?.to_bytes())
}

/// The variable by which a card's memory is limited by hand.
pub(crate) fn memory_variable(ordinal: usize) -> Variable {
    let of_card = Variable::MemoryLimit(Some(ordinal));
    if value_of(of_card).is_some() { of_card } else { Variable::MemoryLimit(None) }
}

fn path_by_hand() -> &'static CStr {
    sys::environment(c"CUDA_DEVICE_MEMORY_SHARED_CACHE")
        .filter(|path| !path.is_empty())
        .unwrap_or(USAGE_BY_HAND)
}

/// Finds the cards, opens the file and takes a slot.
fn attach(state: &'static State, limits: &Limits) -> Result<Option<*mut Container>, Refusal> {
    let (opened, page, spec, settings, setting_up) = match *limits {
        Limits::None => return Ok(None),
        Limits::Mounted(page, spec) => {
            // Before the file: a child that forked after cuInit may not ask the driver, and needs no slot then.
            let _ = ordinals::cards()?;
            (file::open_mounted(USAGE)?, Some(page), spec, None, None)
        }
        Limits::ByHand(settings) => {
            let cards = ordinals::cards()?;
            for variable in environment::beyond(value_of, cards.as_slice().len()) {
                Notice::OfNoCard { variable, cards: cards.as_slice().len() }.say();
            }
            let (opened, spec, others, guard) =
                file::open_by_hand(path_by_hand(), &settings, cards.as_slice())?;
            (opened, None, spec, Some((settings, cards, others)), Some(guard))
        }
    };
    let region = opened.file.region;
    slots::drop_inherited(&opened.file);
    let ready = || {
        let ordinals = Ordinals::of(&ordinals::cards()?, &spec)?;
        if let Some(pid) = opened.file.foreign_process() {
            region.hot().foreign.fetch_add(1, Relaxed);
            return Err(Refusal::ForeignProcess { path: opened.file.text(), pid });
        }
        Ok(ordinals)
    };
    // Until others can see the slot, the file must not be set up anew: no other process would find it in use.
    let guard = Guard(setting_up);
    let claimed = ready()
        .inspect_err(|_| opened.fd.close())
        .and_then(|ordinals| Ok((ordinals, opened.file.claim(opened.fd)?)));
    let (ordinals, slot) = claimed.inspect_err(|_| {
        region.hot().refused.fetch_add(1, Relaxed);
        // SAFETY: nothing else knows of the mapping yet. A program may try again for ever, and must not run out of
        // address space, nor keep a slot that it does not use.
        unsafe { region.unmap() };
    })?;
    let page = page.map_or_else(|| file::private_page(&spec), Ok)?;
    // SAFETY: new memory that nobody frees.
    let file: &'static UsageFile = unsafe { &*place(opened.file)? };
    let cards = cards_of(file, page, &spec, slot);
    for card in cards.iter().flatten() {
        fault::point();
        card.memory.open();
    }
    let container = place(Container {
        state,
        file,
        page,
        by_hand: settings.is_some(),
        enforcement: spec.enforcement,
        policy: settings.as_ref().map_or(Policy::Default, |(settings, ..)| settings.policy),
        cards,
        ordinals,
        slot: Some(slot),
        books: Books::new(),
    })?;
    drop(guard);
    if let Some((settings, cards, others)) = &settings {
        file::tell_of_file(file.text(), &spec, *others, settings, cards.as_slice());
    }
    region.hot().attached.fetch_add(1, Relaxed);
    region.hot().escapes.fetch_add(u64::from(state.escapes.swap(0, Relaxed)), Relaxed);
    Ok(Some(container))
}

/// The descriptor by which a file is being set up.
struct Guard(Option<Fd>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(fd) = self.0 {
            fd.close();
        }
    }
}

/// A container without a slot, for looking.
fn look(state: &'static State) -> Option<*mut Container> {
    let (file, page, spec) = match Limits::find().ok()? {
        Limits::None => return None,
        Limits::Mounted(page, spec) => {
            let opened = file::open_mounted(USAGE).ok()?;
            opened.fd.close();
            (opened.file, page, spec)
        }
        Limits::ByHand(_) => {
            let (opened, header) = file::open_existing(path_by_hand())?;
            let spec = file::page_of_header(&header);
            (opened.file, file::private_page(&spec).ok()?, spec)
        }
    };
    // SAFETY: new memory that nobody frees.
    let file: &'static UsageFile = unsafe { &*place(file).ok()? };
    place(Container {
        state,
        file,
        page,
        by_hand: false,
        enforcement: spec.enforcement,
        policy: Policy::Default,
        // It never claims anything; one's own slot is never reaped, so the last that anybody gets.
        cards: cards_of(file, page, &spec, usage::SLOTS - 1),
        ordinals: Ordinals::none(),
        slot: None,
        books: Books::new(),
    })
    .ok()
}

/// Puts something into memory of its own, where it stays.
fn place<T>(value: T) -> Result<*mut T, Refusal> {
    let at = sys::map_private(size_of::<T>()).map_err(Refusal::NoMemory)?.cast::<T>();
    // SAFETY: new memory of this size, aligned to a page.
    unsafe { at.write(value) };
    Ok(at)
}

/// The cards of a page, with their words in the usage file.
fn cards_of(
    file: &'static UsageFile,
    page: &'static Page,
    spec: &PageSpec,
    slot: usize,
) -> [Option<Card>; MAX_DEVICES] {
    let (hot, region) = (file.region.hot(), file.region);
    let mut cards = [const { None }; MAX_DEVICES];
    let entries = spec.devices.iter().zip(&page.cards).zip(&hot.cards);
    for (index, (((device, terms), words), place)) in entries.zip(cards.iter_mut()).enumerate() {
        let limit = device.memory_limit.get();
        let account = Account::new(&words.total, region.slots(index), &hot.high_water, slot, limit);
        *place = account.map(|memory| Card {
            index: u8::try_from(index).unwrap_or(0),
            uuid: device.uuid,
            limit,
            memory,
            words,
            terms,
            file,
        });
    }
    cards
}

/// Whether a function that cannot be held to the limit is to be refused: a limit is asked for, and the page does not
/// say `report`. May be asked before the process is attached.
pub(crate) fn refuses() -> bool {
    match state::make().map(State::phase) {
        Ok(Phase::Open) => false,
        Ok(Phase::Refused) => true,
        Ok(Phase::Attached) => attached().is_some_and(|c| c.enforcement == Enforcement::Required),
        Ok(Phase::New | Phase::Busy) | Err(_) => wanted(),
    }
}

/// Counts a look-up that could not be answered with a wrapper (`escapes` of the usage file).
pub(crate) fn count_escape() {
    let Ok(state) = state::make() else { return };
    match attached() {
        Some(container) => {
            container.file.region.hot().escapes.fetch_add(1, Relaxed);
        }
        // The file learns of it when the process attaches.
        None => {
            state.escapes.fetch_add(1, Relaxed);
        }
    }
}

/// A card's name for C.
#[derive(Debug)]
pub(crate) struct Name([u8; CardUuid::MAX + 1]);

impl Name {
    fn new(uuid: CardUuid) -> Option<Self> {
        let mut name = [0; CardUuid::MAX + 1];
        let text = uuid.as_bytes();
        name.get_mut(..text.len())?.copy_from_slice(text);
        Some(Self(name))
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

/// A process of the container that has memory on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// As this container counts.
    pub(crate) pid: i32,
    /// As the host counts; 0 = the agent has not said yet.
    pub(crate) host_pid: i32,
    /// Bytes on the card.
    pub(crate) bytes: u64,
}

impl Container {
    /// A card by its place in both files.
    #[inline]
    pub(crate) fn card_at(&self, index: u8) -> Option<&Card> {
        self.cards.get(usize::from(index))?.as_ref()
    }

    /// The cards.
    pub(crate) fn cards(&self) -> impl Iterator<Item = &Card> {
        self.cards.iter().flatten()
    }

    /// A card by CUDA's number in this process.
    #[inline]
    pub(crate) fn card(&self, device: CUdevice) -> Option<&Card> {
        self.card_at(self.ordinals.index(device)?)
    }

    /// CUDA's number of a card in this process.
    pub(crate) fn device(&self, card: &Card) -> Option<CUdevice> {
        self.ordinals.device(card.index)
    }

    /// The card of the calling thread's current context; `None` without one.
    #[inline]
    pub(crate) fn current_card(&self) -> Option<&Card> {
        let ask = driver::function!(cuCtxGetDevice: unsafe extern "C" fn(*mut CUdevice) -> CUresult)?;
        let mut device = -1;
        // SAFETY: the driver writes one number.
        let result = unsafe { ask(&raw mut device) };
        // HK-08: the driver leaves the number alone when there is no context.
        result.is_ok().then(|| self.card(device)).flatten()
    }

    /// The card with this uuid, in NVML's writing (`GPU-…`, `MIG-…`).
    pub(crate) fn card_by_uuid(&self, text: &str) -> Option<&Card> {
        let wanted = uuid::parse(text.as_bytes());
        self.cards().find(|card| {
            card.uuid.as_str() == text || (wanted.is_some() && uuid::parse(card.uuid.as_bytes()) == wanted)
        })
    }

    /// This process's number as the host counts (0 = the agent has not said yet) and as the container does.
    pub(crate) fn own_pids(&self) -> [u32; 2] {
        let Some(slot) = self.slot.map(|slot| self.file.region.hami_slot(slot)) else { return [0; 2] };
        [&slot.host_pid, &slot.pid].map(|pid| u32::try_from(pid.load(Relaxed)).unwrap_or(0))
    }

    /// HAMi's words that steer launches.
    pub(crate) fn hami(&self) -> &'static HamiTail {
        self.file.region.hami_tail()
    }

    /// The others of the container, for a claim.
    #[inline]
    pub(crate) fn peers(&self) -> Peers<'_> {
        Peers::new(self)
    }

    /// Takes dead processes off the books of a card, at most once a second.
    #[inline]
    pub(crate) fn reap_now_and_then(&self, card: &Card) {
        let now = sys::clock::coarse_ns();
        let last = self.state.reaped_ns.load(Relaxed);
        if now.saturating_sub(last) > peers::REAP_EVERY_NS {
            self.reap_at(card, last, now);
        }
    }

    #[cold]
    fn reap_at(&self, card: &Card, last: u64, now: u64) {
        if self.state.reaped_ns.compare_exchange(last, now, Relaxed, Relaxed).is_ok() {
            card.memory.reap_dead(&mut self.peers());
        }
    }
}

impl Card {
    /// Its uuid as both files write it.
    pub(crate) fn name(&self) -> Option<Name> {
        Name::new(self.uuid)
    }

    /// Limit in bytes; `None` = this card has none.
    #[inline]
    pub(crate) fn limit(&self) -> Option<u64> {
        (self.limit != u64::MAX).then_some(self.limit)
    }

    /// Whether the limit leaves some of the card to others, as far as is known.
    pub(crate) fn is_shared(&self) -> bool {
        let real = self.terms.real_memory.load(Relaxed);
        real == 0 || self.limit < real
    }

    /// Bytes that the container has on the card.
    #[inline]
    pub(crate) fn used(&self) -> u64 {
        self.memory.used()
    }

    /// Shows every live process of the container with bytes on this card (or without, when it only has a slot).
    pub(crate) fn each_process(&self, see: &mut dyn FnMut(Process)) {
        let region = self.file.region;
        let words = region.slots(usize::from(self.index));
        self.file.each_owned(|slot| {
            let hami = region.hami_slot(slot);
            let pid = hami.pid.load(Acquire);
            if let Some(words) = words.get(slot).filter(|_| pid > 0) {
                let bytes = mullion_accounting::Word::load(&words.claimed);
                see(Process { pid, host_pid: hami.host_pid.load(Relaxed), bytes });
            }
        });
    }
}

const _: () = assert!(usage::SLOTS == 1024 && MAX_DEVICES == 16);
