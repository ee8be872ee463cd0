//! `terrace top`: a run on one screen, while it trains and after.
//!
//! It reads what the run writes, a few times a second, and asks nothing of it.

#[path = "top/screen.rs"]
mod screen;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use terrace::error::{Error, Result};
use terrace::log::history::History;
use terrace::log::status::Status;

use crate::say;
use screen::{Screen, draw};

/// Arguments of `terrace top`.
#[derive(Args)]
pub(crate) struct TopArguments {
    /// The run's directory: its log.dir
    run: PathBuf,
    /// Print one screen as text and end, as without a terminal
    #[arg(long)]
    once: bool,
}

/// From one look at the run to the next.
const LOOK: Duration = Duration::from_millis(500);
/// Looks over which rates are taken.
const LOOKS: usize = 6;
/// Columns and lines of a screen as text.
const PLAIN: (u16, u16) = (80, 24);

/// Runs the command.
pub(crate) fn top(arguments: &TopArguments) -> Result<()> {
    let history = History::open(&arguments.run)?;
    if arguments.once || !std::io::stdout().is_terminal() {
        return plain(&history);
    }
    let failed = |error| Error::io("draw on", "the terminal".as_ref(), error);
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, ended.clone()).map_err(failed)?;
    }
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let shown = show(&mut terminal, history, &ended);
    ratatui::restore();
    shown
}

/// One screen as lines of text.
fn plain(history: &History) -> Result<()> {
    let screen = Screen::of(history, &[]);
    let Ok(mut terminal) = Terminal::new(TestBackend::new(PLAIN.0, PLAIN.1));
    let Ok(_) = terminal.draw(|frame| draw(frame, &screen));
    let cells = terminal.backend().buffer().content();
    for line in cells.chunks(usize::from(PLAIN.0)) {
        let line: String = line.iter().map(|cell| cell.symbol()).collect();
        say(line.trim_end())?;
    }
    Ok(())
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    mut history: History,
    ended: &AtomicBool,
) -> Result<()> {
    let failed = |error| Error::io("draw on", "the terminal".as_ref(), error);
    let mut looks: Vec<Status> = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        history.update()?;
        if let Some(status) = &history.status {
            let of_another = looks.last().is_some_and(|last| last.pid != status.pid);
            if of_another {
                looks.clear();
            }
            if looks
                .last()
                .is_none_or(|last| last.updated_at < status.updated_at)
            {
                looks.push(status.clone());
            }
            if looks.len() > LOOKS {
                looks.remove(0);
            }
        }
        let screen = Screen::of(&history, &looks);
        terminal
            .draw(|frame| draw(frame, &screen))
            .map_err(failed)?;
        if event::poll(LOOK).map_err(failed)? && quits(&event::read().map_err(failed)?) {
            break;
        }
    }
    Ok(())
}

fn quits(event: &Event) -> bool {
    let Event::Key(key) = event else {
        return false;
    };
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press
        && (matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
            || (control && key.code == KeyCode::Char('c')))
}
