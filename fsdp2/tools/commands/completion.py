"""``fsdp2 completion bash|zsh|fish``: scripts that complete commands and options, made of the commands' parsers."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2.tools.commands.parsing import Parser

SHELLS = ("bash", "zsh", "fish")
Words = dict[tuple[str, ...], list[tuple[str, str]]]
"""What may follow the commands said so far: words, and what they mean."""


def parser() -> Parser:
    """What it understands."""
    made = Parser(
        "fsdp2 completion",
        "Print a script that completes the commands and options of fsdp2.\n\n"
        "  bash: fsdp2 completion bash >> ~/.bash_completion\n"
        "  zsh:  fsdp2 completion zsh > a folder of $fpath, as the file _fsdp2\n"
        "  fish: fsdp2 completion fish > ~/.config/fish/completions/fsdp2.fish",
        "source <(fsdp2 completion bash)",
    )
    made.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    return made


def main(arguments: Sequence[str]) -> int:
    """Print it."""
    shell = parser().parse_all(arguments).shell
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](words()))
    return 0


def words() -> Words:
    """All commands, and the options of each."""
    from fsdp2.tools.commands.entry import COMMANDS  # which has this module in its table

    found: Words = {(): [(each.name, each.does) for each in COMMANDS]}
    found[()] += [("--help", "what there is"), ("--version", "the version")]
    for command in COMMANDS:
        _add(found, (command.name,), command.parser())
    found["completion",] += [(shell, f"for {shell}") for shell in SHELLS]
    return found


def _add(found: Words, path: tuple[str, ...], parser: Parser) -> None:
    inner = parser.subcommands()
    found[path] = [(name, each.description or "") for name, each in inner.items()]
    for action in parser._actions:
        found[path] += [(each, action.help or "") for each in action.option_strings if each.startswith("--")]
    for name, each in inner.items():
        _add(found, (*path, name), each)


def _short(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return "".join(char for char in line if char not in "'\"\\:[]`$").replace("%(default)s", "")


def bash(words: Words) -> str:
    """A function of bash's, and where it is called."""
    cases = "\n".join(
        f'    "{" ".join(path)}") words="{" ".join(word for word, _ in found)}" ;;' for path, found in words.items()
    )
    return f"""\
# Completes the commands and options of fsdp2 in bash. Printed by `fsdp2 completion bash`.
_fsdp2() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" path="" words="" index word
  for ((index = 1; index < COMP_CWORD; index++)); do
    word="${{COMP_WORDS[index]}}"
    [[ $word == -* ]] && continue
    case "${{path:+$path }}$word" in
      {"|".join(f'"{" ".join(path)}"' for path in words if path)}) path="${{path:+$path }}$word" ;;
    esac
  done
  case "$path" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  # Paths, where no word fits.
  [[ ${{#COMPREPLY[@]}} -eq 0 && $current != -* ]] && COMPREPLY=($(compgen -f -- "$current"))
  return 0
}}
complete -o filenames -F _fsdp2 fsdp2"""


def zsh(words: Words) -> str:
    """A function of zsh's."""
    cases = []
    for path, found in words.items():
        described = " ".join(f"'{word}:{_short(does)}'" for word, does in found)
        cases.append(f'    "{" ".join(path)}") found=({described}) ;;')
    known = "|".join(f'"{" ".join(path)}"' for path in words if path)
    lines = "\n".join(cases)
    return f"""\
#compdef fsdp2
# Completes the commands and options of fsdp2 in zsh. Printed by `fsdp2 completion zsh`.
_fsdp2() {{
  local path_so_far="" word index
  local -a found
  for ((index = 2; index < CURRENT; index++)); do
    word="${{words[index]}}"
    [[ $word == -* ]] && continue
    case "${{path_so_far:+$path_so_far }}$word" in
      {known}) path_so_far="${{path_so_far:+$path_so_far }}$word" ;;
    esac
  done
  case "$path_so_far" in
{lines}
  esac
  _describe 'fsdp2' found || _files
}}
compdef _fsdp2 fsdp2"""


def fish(words: Words) -> str:
    """Lines of fish's ``complete``."""
    lines = ["# Completes the commands and options of fsdp2 in fish. Printed by `fsdp2 completion fish`."]
    for path, found in words.items():
        inner = [word for word, _ in words[path] if not word.startswith("-")]
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path) or "__fish_use_subcommand"
        if path and inner:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(inner)}"
        for word, does in found:
            if word.startswith("--"):
                condition = seen if path else "__fish_use_subcommand"
                lines.append(f"complete -c fsdp2 -n '{condition}' -l {word[2:]} -d '{_short(does)}'")
            else:
                lines.append(f"complete -c fsdp2 -n '{seen}' -a {word} -d '{_short(does)}'")
    return "\n".join(lines)
