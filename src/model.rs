//! What a model is: its dimensions, its ordered layers, each tensor's name, shape and init.
//!
//! - Layers in order: embed (0), blocks (1..=L), head (L + 1). One tile each.
//! - Names are Hugging Face's, so that import and export are a lookup.
//! - A tied model has no `lm_head.weight`: the head binds the embed tile's weight besides its own.
//!
//! Pure: `config` parsing is in [`parse`], files are read by `hf`.

pub mod parse;
pub mod random;

use crate::tile::{TileId, TileLayout};

/// The architectures that are trained, as `config.json` names them in `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2, 3, 3.1 and models of that shape.
    Llama,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: RMSNorm on each head of q and k.
    Qwen3,
    /// Mistral: sliding window.
    Mistral,
}

/// How rotary frequencies are scaled. Formulas: `transformers.modeling_rope_utils`.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// theta^(−2i/D).
    Default,
    /// Frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high kept, a smooth ramp between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above original/low_freq_factor are divided.
        low_freq_factor: f64,
        /// Wavelengths below original/high_freq_factor are kept.
        high_freq_factor: f64,
        /// Positions of the original training.
        original_max_positions: u64,
    },
    /// YaRN, static: interpolation by a ramp over dimensions, and a scale on cos and sin.
    Yarn {
        /// Divisor.
        factor: f64,
        /// Dimensions with more rotations than this are kept.
        beta_fast: f64,
        /// Dimensions with fewer rotations than this are divided.
        beta_slow: f64,
        /// Positions of the original training.
        original_max_positions: u64,
        /// Scale of cos and sin.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded outward to whole dimensions.
        truncate: bool,
    },
}

/// Rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Scaling.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Inverse frequencies (`head_dim / 2`, f32 as transformers computes them) and the scale of cos
    /// and sin.
    pub fn inverse_frequencies(&self, head_dim: u64) -> (Vec<f32>, f32) {
        let half = head_dim / 2;
        let theta = self.theta as f32;
        let base: Vec<f32> = (0..half)
            .map(|i| 1.0 / theta.powf((2 * i) as f32 / head_dim as f32))
            .collect();
        match self.scaling {
            RopeScaling::Default => (base, 1.0),
            RopeScaling::Linear { factor } => {
                (base.iter().map(|f| f / factor as f32).collect(), 1.0)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                // In f32 and with reciprocals, as torch computes it: only powf may differ.
                let original = original_max_positions as f64;
                let (low, high) = (low_freq_factor as f32, high_freq_factor - low_freq_factor);
                let low_wavelength = (original / low_freq_factor) as f32;
                let high_wavelength = (original / high_freq_factor) as f32;
                let scaled = base.iter().map(|&frequency| {
                    let wavelength = frequency.recip() * std::f32::consts::TAU;
                    if wavelength < high_wavelength {
                        frequency
                    } else if wavelength > low_wavelength {
                        frequency / factor as f32
                    } else {
                        let smooth = (wavelength.recip() * original as f32 - low) / high as f32;
                        (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
                    }
                });
                (scaled.collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_positions,
                attention_factor,
                truncate,
            } => {
                let dim_of_rotations = |rotations: f64| {
                    head_dim as f64
                        * (original_max_positions as f64 / (rotations * 2.0 * std::f64::consts::PI))
                            .ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) =
                    (dim_of_rotations(beta_fast), dim_of_rotations(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(head_dim as f64 - 1.0);
                if low == high {
                    high += 0.001;
                }
                let scaled = base.iter().enumerate().map(|(i, &frequency)| {
                    let ramp = (i as f32 - low as f32) / (high - low) as f32;
                    let kept = 1.0 - ramp.clamp(0.0, 1.0);
                    let position = theta.powf((2 * i) as f32 / head_dim as f32);
                    let divided = (factor as f32 * position).recip();
                    divided * (1.0 - kept) + frequency * kept
                });
                (scaled.collect(), attention_factor as f32)
            }
        }
    }
}

/// How a tensor begins when a model is made from a seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// All ones (norms).
    Ones,
    /// All zeros (biases).
    Zeros,
}

/// A named, shaped tensor of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Name in Hugging Face's files.
    pub name: String,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// How it begins.
    pub init: Init,
}

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Token embedding.
    Embed,
    /// Transformer block of that index, from 0.
    Block(u16),
    /// Final norm, LM head and loss.
    Head,
}

/// A model's dimensions and choices, from `config.json` or from run.toml.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Architecture.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Width of the MLP.
    pub intermediate: u64,
    /// Transformer blocks.
    pub blocks: u16,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Width of a head; even.
    pub head_dim: u64,
    /// RMSNorm's epsilon.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Sliding window of each block: the keys that a query sees, itself included.
    pub windows: Vec<Option<u64>>,
    /// The head uses the embedding's weight.
    pub tied: bool,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output.
    pub output_bias: bool,
    /// RMSNorm on each head of q and k.
    pub qk_norm: bool,
    /// Positions the model was made for.
    pub max_positions: u64,
    /// Standard deviation of random weights.
    pub initializer_range: f32,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Id that begins a text, if the model has one.
    pub bos_token_id: Option<u32>,
}

impl ModelSpec {
    /// Layers: embed, blocks, head.
    pub fn layer_count(&self) -> u16 {
        self.blocks + 2
    }

    /// What layer `index` is.
    pub fn layer_kind(&self, index: u16) -> LayerKind {
        assert!(index < self.layer_count());
        match index {
            0 => LayerKind::Embed,
            i if i == self.blocks + 1 => LayerKind::Head,
            i => LayerKind::Block(i - 1),
        }
    }

    /// The embed tile.
    pub fn embed_tile(&self) -> TileId {
        TileId { layer: 0, part: 0 }
    }

    /// The head tile.
    pub fn head_tile(&self) -> TileId {
        TileId {
            layer: self.blocks + 1,
            part: 0,
        }
    }

    /// Tensors of layer `index`, in Hugging Face's order.
    pub fn layer_tensors(&self, index: u16) -> Vec<TensorSpec> {
        let normal = Init::Normal(self.initializer_range);
        let tensor = |name: String, shape: Vec<u64>, init| TensorSpec { name, shape, init };
        match self.layer_kind(index) {
            LayerKind::Embed => vec![tensor(
                "model.embed_tokens.weight".to_string(),
                vec![self.vocab_size, self.hidden],
                normal,
            )],
            LayerKind::Head => {
                let mut tensors = Vec::new();
                if !self.tied {
                    let shape = vec![self.vocab_size, self.hidden];
                    tensors.push(tensor("lm_head.weight".to_string(), shape, normal));
                }
                tensors.push(tensor(
                    "model.norm.weight".to_string(),
                    vec![self.hidden],
                    Init::Ones,
                ));
                tensors
            }
            LayerKind::Block(block) => {
                let (hidden, inner) = (self.hidden, self.intermediate);
                let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
                let mut tensors = Vec::new();
                let mut add = |name: &str, shape: Vec<u64>, init| {
                    let name = format!("model.layers.{block}.{name}");
                    tensors.push(TensorSpec { name, shape, init });
                };
                add("self_attn.q_proj.weight", vec![q, hidden], normal);
                add("self_attn.k_proj.weight", vec![kv, hidden], normal);
                add("self_attn.v_proj.weight", vec![kv, hidden], normal);
                add("self_attn.o_proj.weight", vec![hidden, q], normal);
                add("mlp.gate_proj.weight", vec![inner, hidden], normal);
                add("mlp.up_proj.weight", vec![inner, hidden], normal);
                add("mlp.down_proj.weight", vec![hidden, inner], normal);
                add("input_layernorm.weight", vec![hidden], Init::Ones);
                add("post_attention_layernorm.weight", vec![hidden], Init::Ones);
                if self.qkv_bias {
                    add("self_attn.q_proj.bias", vec![q], Init::Zeros);
                    add("self_attn.k_proj.bias", vec![kv], Init::Zeros);
                    add("self_attn.v_proj.bias", vec![kv], Init::Zeros);
                }
                if self.output_bias {
                    add("self_attn.o_proj.bias", vec![hidden], Init::Zeros);
                }
                if self.qk_norm {
                    add("self_attn.q_norm.weight", vec![self.head_dim], Init::Ones);
                    add("self_attn.k_norm.weight", vec![self.head_dim], Init::Ones);
                }
                tensors
            }
        }
    }

    /// Layout of layer `index`'s tile.
    pub fn tile_layout(&self, index: u16) -> TileLayout {
        let tensors: Vec<_> = self
            .layer_tensors(index)
            .into_iter()
            .map(|t| (t.name, t.shape))
            .collect();
        TileLayout::new(
            TileId {
                layer: index,
                part: 0,
            },
            &tensors,
        )
    }

    /// Layouts of all tiles, by layer.
    pub fn tile_layouts(&self) -> Vec<TileLayout> {
        (0..self.layer_count())
            .map(|index| self.tile_layout(index))
            .collect()
    }

    /// Parameters of the whole model; a tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        self.tile_layouts()
            .iter()
            .map(|layout| layout.parameters)
            .sum()
    }
}
