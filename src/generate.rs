//! Text from a model, a token at a time, its layers streamed through the same tiers.
//!
//! Each token runs the whole text so far through the forward-only schedule: there is no cache of
//! keys and values, so the cost of a token grows with the text. Greedy, or sampled by temperature
//! and nucleus (top-p, Holtzman et al. 2020) from a generator seeded by (seed, position).

use crate::data::formats::Conversation;
use crate::data::{Micro, TextTokenizer};
use crate::error::{Error, Result};
use crate::step::Engine;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f64,
    /// Smallest set of tokens whose probabilities reach this is sampled from.
    pub top_p: f64,
    /// Seed of the choices.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Sampling = Sampling {
        temperature: 0.0,
        top_p: 1.0,
        seed: 0,
    };
}

/// Ids of a text to continue, with what the model expects first; `chat`: as a user's turn in the
/// chat template. `place` names it in errors.
///
/// # Errors
/// [`Error::Input`] for a chat without a template, and for one that refuses the text.
pub fn prompt_ids(
    tokenizer: &TextTokenizer,
    text: &str,
    chat: bool,
    place: &str,
) -> Result<Vec<u32>> {
    if !chat {
        return tokenizer.encode(text, true);
    }
    let template = tokenizer.template().ok_or_else(|| {
        let expected = "a tokenizer with a chat template";
        Error::input("chat", place, expected, "none", "leave the chat out")
    })?;
    let mut conversation = Conversation::exchange(text.to_string(), String::new());
    conversation.turns.pop();
    let rendered = template
        .renderer()
        .and_then(|renderer| renderer.prompt(&conversation))
        .map_err(|fault| fault.at("chat template", place))?;
    tokenizer.encode(&rendered, false)
}

/// Extends `tokens` by at most `count`, ending early at one of `ends` (which is not given to
/// `each`). `each` gets every new token and returns whether to go on.
///
/// # Errors
/// [`Error::Input`] for an empty text, or one that grows beyond the plan's longest sequence.
pub fn generate(
    engine: &mut Engine,
    tokens: &mut Vec<u32>,
    count: u64,
    ends: &[u32],
    sampling: Sampling,
    mut each: impl FnMut(u32) -> Result<bool>,
) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::input(
            "generate",
            "the prompt",
            "at least one token",
            "none",
            "give a text to continue",
        ));
    }
    let longest = engine.plan().map.shape.seq_len;
    if (tokens.len() as u64).saturating_add(count) > longest + 1 {
        return Err(Error::input(
            "generate",
            "prompt and --tokens",
            format!("1 to {longest} tokens together"),
            format!("{} + {count}", tokens.len()),
            "shorten the prompt, lower --tokens, or raise --seq-len",
        ));
    }
    for _ in 0..count {
        let length = u32::try_from(tokens.len()).expect("bounded by the plan");
        let micro = Micro {
            tokens: tokens.clone(),
            targets: vec![crate::data::IGNORE; tokens.len()],
            positions: (0..length).collect(),
            bounds: vec![0, length],
        };
        let logits = engine.last_logits(vec![micro])?.swap_remove(0);
        let next = choose(&logits, sampling, tokens.len() as u64);
        if ends.contains(&next) {
            break;
        }
        tokens.push(next);
        if !each(next)? {
            break;
        }
    }
    Ok(())
}

/// The next token from logits `[V]`; ties go to the lowest id.
fn choose(logits: &[f32], sampling: Sampling, position: u64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |id: &u32| logits[*id as usize];
    let best = *order
        .iter()
        .max_by(|a, b| logit(a).total_cmp(&logit(b)).then(b.cmp(a)))
        .expect("a model has a vocabulary");
    if sampling.temperature <= 0.0 {
        return best;
    }
    order.sort_by(|a, b| logit(b).total_cmp(&logit(a)).then(a.cmp(b)));
    let highest = f64::from(logit(&best));
    let weight = |id: &u32| ((f64::from(logit(id)) - highest) / sampling.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut kept = 0.0;
    let nucleus = order
        .iter()
        .take_while(|id| {
            let more = kept < sampling.top_p * total;
            kept += weight(id);
            more
        })
        .count()
        .max(1);
    let nucleus = &order[..nucleus];
    let mass: f64 = nucleus.iter().map(weight).sum();
    let mut left = uniform(sampling.seed, position) * mass;
    for id in nucleus {
        left -= weight(id);
        if left < 0.0 {
            return *id;
        }
    }
    nucleus[nucleus.len() - 1]
}

/// A number in 0..1 from (seed, position): two rounds of splitmix64 (Steele et al. 2014).
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |x: u64| {
        let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    (mix(mix(seed) ^ position) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_highest_and_sampling_stays_in_the_nucleus() {
        let logits = [0.0, 3.0, 1.0, 3.0, -2.0];
        assert_eq!(choose(&logits, Sampling::GREEDY, 0), 1);
        let narrow = Sampling {
            temperature: 1.0,
            top_p: 0.8,
            seed: 7,
        };
        let mut seen = [0u32; 5];
        for position in 0..2000 {
            seen[choose(&logits, narrow, position) as usize] += 1;
        }
        assert_eq!((seen[0], seen[2], seen[4]), (0, 0, 0));
        assert!(seen[1].abs_diff(seen[3]) < 200, "{seen:?}");
        let wide = Sampling {
            top_p: 1.0,
            ..narrow
        };
        let drawn: Vec<u32> = (0..2000).map(|at| choose(&logits, wide, at)).collect();
        // P(2) = e / (2e³ + e + 1 + e⁻²) = 0.062.
        let twos = drawn.iter().filter(|id| **id == 2).count();
        assert!((80..170).contains(&twos), "{twos}");
    }
}
