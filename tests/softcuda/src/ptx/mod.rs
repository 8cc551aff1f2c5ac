//! A stand-in for the interpreter of PTX: whatever a kernel's text says, it copies the 8 bytes at its second parameter to its
//! first; one whose name begins with "follow" takes those bytes as the address to copy from.

/// Device memory, as a kernel sees it.
pub trait Memory: Sync {
    /// Reads the bytes at an address.
    fn load(&self, address: u64, into: &mut [u8]) -> Result<(), Fault>;
    /// Writes the bytes at an address.
    fn store(&self, address: u64, from: &[u8]) -> Result<(), Fault>;
}

/// An access where no device memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Its address.
    pub address: u64,
    /// Its length.
    pub len: usize,
}

/// A module.
pub struct Module {
    kernels: Vec<Kernel>,
}

impl Module {
    /// Reads a module.
    pub fn parse(text: &str) -> Result<Module, String> {
        if !text.contains(".version") {
            return Err("line 1: no .version".into());
        }
        let kernel = |(entry, _): (&str, &str)| {
            let (name, params) = entry.split_once('(')?;
            Some(Kernel {
                name: name.trim().to_owned(),
                params: vec![8; params.matches(".param .u64").count()],
            })
        };
        let entries = text
            .split(".entry")
            .skip(1)
            .filter_map(|entry| entry.split_once(')'));
        let kernels: Option<Vec<Kernel>> = entries.map(kernel).collect();
        kernels
            .map(|kernels| Module { kernels })
            .ok_or_else(|| "an entry without parameters".into())
    }

    /// A kernel by its name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }
}

/// A kernel.
pub struct Kernel {
    name: String,
    params: Vec<usize>,
}

impl Kernel {
    /// Size in bytes of each parameter.
    pub fn params(&self) -> &[usize] {
        &self.params
    }

    /// Runs it.
    pub fn run(
        &self,
        _grid: [u32; 3],
        _block: [u32; 3],
        params: &[u8],
        memory: &dyn Memory,
    ) -> Result<(), Fault> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&params[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let mut bytes = [0; 8];
        memory.load(word(8), &mut bytes)?;
        if self.name.starts_with("follow") {
            memory.load(u64::from_le_bytes(bytes), &mut bytes)?;
        }
        memory.store(word(0), &bytes)
    }
}
