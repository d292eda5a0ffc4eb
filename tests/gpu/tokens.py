"""Token ids from the Python files of this host, in nanoGPT's headerless u16 layout.

    python3 tests/gpu/tokens.py OUT.bin [COUNT [VOCAB]]

Words and punctuation are numbered by frequency; those beyond the vocabulary share one id. These are not GPT-2's tokens,
but real text with its statistics, on any host and without a download.
"""

import array
import collections
import pathlib
import re
import sys
import sysconfig

VOCAB = 50257


def words(limit):
    count = 0
    roots = [sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]]
    for root in dict.fromkeys(roots):
        for path in sorted(pathlib.Path(root).rglob("*.py")):
            text = path.read_text(errors="replace")
            for word in re.findall(r"\w+|\s+|[^\w\s]", text):
                yield word
                count += 1
                if count == limit:
                    return


def main():
    out, limit = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8_000_000
    vocab = int(sys.argv[3]) if len(sys.argv) > 3 else VOCAB
    text = list(words(limit))
    common = collections.Counter(text).most_common(vocab - 1)
    ids = {word: i for i, (word, _) in enumerate(common)}
    tokens = array.array("H", (ids.get(word, vocab - 1) for word in text))
    with open(out, "wb") as file:
        tokens.tofile(file)
    print(f"{len(tokens)} tokens, {len(ids) + 1} ids, {out}")


if __name__ == "__main__":
    main()
