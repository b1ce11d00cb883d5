"""Streamed text is the decoded output, whatever its bytes are and in whatever pieces its tokens come.

Two small tokenizers stand for two families. In one a token is some bytes (GPT-2, Llama 3, Qwen). In the other it is a word
with the space before it, which the first word loses, or a single byte of what is in no word (Llama 2, Mistral, Gemma).
"""

import pytest
import transformers
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paged.decoding.text import TextStream
from paged.errors import InvalidTokens, PagedError, TextEnded

from .files_of_others import assert_by_hand, by_hand_in  # noqa: TID252

LINES = ["the cat sat on the mat", "the dog sat on the cat", "你好，世界", "cafe\u0301", "so happy 😀 👩‍👩‍👧"] * 3
# The end of one 你 and the beginning of the next: a token with which a text never stands between characters.
ACROSS = "你你".encode()[1:4]
WORDS = ["▁", "▁the", "▁cat", "▁sat", "s", ".", "▁▁▁", "�"]


def spelt(data: bytes) -> str:
    """A letter for each byte, as in GPT-2's vocabulary: what cannot be printed is a letter from U+0100 on, in order."""
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(range(256, 512))
    table = [chr(byte) if chr(byte) in letters else chr(next(others)) for byte in range(256)]
    return "".join(table[byte] for byte in data)


def in_bytes():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    pieces = [*trained.get_vocab(), spelt(ACROSS), ""]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return finished(tokenizer)


def in_words():
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return finished(tokenizer)


def finished(tokenizer):
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


FAMILIES = {"bytes": in_bytes(), "words": in_words()}
BYTES, WORDS_AND_BYTES = FAMILIES.values()


def byte_ids(data: bytes) -> list[int]:
    """Of the family of bytes, each as a token of its own."""
    return BYTES.convert_tokens_to_ids(list(spelt(data)))


def word_ids(*pieces: str) -> list[int]:
    """Of the family of words; "E4BDA0" is three bytes."""
    ids = []
    for piece in pieces:
        names = [piece] if piece in WORDS else [f"<0x{byte:02X}>" for byte in bytes.fromhex(piece)]
        ids += WORDS_AND_BYTES.convert_tokens_to_ids(names)
    return ids


def pushed(tokenizer, prompt, pieces) -> list[str]:
    """What each piece returned, and finish."""
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


def continued(tokenizer, prompt, output) -> str:
    """What the output adds to the decoded prompt: all that follows what both texts have in common."""
    before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    while not after.startswith(before):
        before = before[:-1]
    return after[len(before) :]


def ids_of(family: str) -> st.SearchStrategy[list[int]]:
    """Random ids, dense in bytes that begin, continue and break characters; ids that name nothing are among them."""
    tokenizer = FAMILIES[family]
    any_id = st.integers(0, len(tokenizer) + 2)
    texts = st.sampled_from(["你", "😀", "the", " cat", "e\u0301", "\ufffd", ""])
    data = st.one_of(
        texts.map(str.encode), texts.map(lambda text: text.encode()[:-1]), st.binary(min_size=1, max_size=3)
    )
    spell = byte_ids if family == "bytes" else lambda data: word_ids(data.hex())
    runs = st.one_of(data.map(spell), st.lists(any_id, max_size=3), st.just([tokenizer.eos_token_id]))
    return st.lists(runs, max_size=30).map(lambda lists: [id for ids in lists for id in ids])


@st.composite
def programs(draw):
    """A tokenizer, a prompt, an output, and the same output in pieces."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    prompt, output = draw(ids_of(family)), draw(ids_of(family))
    pieces, rest = [], output
    while rest:
        length = draw(st.sampled_from([1, 1, 1, 2, 5, 40]))
        pieces.append(rest[:length])
        rest = rest[length:]
    return family, prompt, output, pieces


@given(programs())
def test_all_that_is_returned_is_what_the_output_adds_to_the_prompt(program):
    family, prompt, output, pieces = program
    tokenizer = FAMILIES[family]
    told = "".join(pushed(tokenizer, prompt, pieces))
    assert told == continued(tokenizer, prompt, output)
    alone = "".join(pushed(tokenizer, [], pieces))
    assert alone == tokenizer.decode(output)


FIRST, REST = byte_ids("你".encode()[:1]), byte_ids("你".encode()[1:])
END, NOTHING, EMPTY = [BYTES.eos_token_id], [len(BYTES) + 7], [BYTES.convert_tokens_to_ids("")]
THE, CAT, SAT, NI = (word_ids(piece) for piece in ("▁the", "▁cat", "▁sat", "E4BDA0"))
SMILE = byte_ids("😀".encode())
UNKNOWN = [len(WORDS_AND_BYTES)] * 50


@pytest.mark.parametrize(("call", "told"), by_hand_in("streams.txt"))
def test_each_piece_is_told_as_soon_as_it_stands(call, told):
    assert_by_hand(call, told, globals())


@pytest.mark.parametrize("wrong", [[-1], [True], [0.5], ["a"], "a", [2**31], [[1]], None])
def test_what_is_no_token_id_is_refused_and_changes_nothing(wrong):
    stream = TextStream(BYTES, [])
    stream.push(byte_ids("你".encode()[:1]))
    with pytest.raises(InvalidTokens):
        stream.push(wrong)
    assert stream.push(byte_ids("你".encode()[1:])) == "你"


def test_a_finished_stream_takes_no_more_tokens():
    stream = TextStream(BYTES, [])
    stream.push(byte_ids(b"a\xe4"))
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")
    with pytest.raises(TextEnded, match="a stream of their own") as refusal:
        stream.push(byte_ids(b"a"))
    assert isinstance(refusal.value, PagedError)


class Counting:
    """A tokenizer's backend that counts the ids it decodes."""

    def __init__(self, tokenizer) -> None:
        self.backend_tokenizer = self
        self.num_decoded = 0
        self._backend = tokenizer.backend_tokenizer
        self.id_to_token = self._backend.id_to_token

    def decode(self, ids, **options):
        self.num_decoded += len(ids)
        return self._backend.decode(ids, **options)


ENDLESS = {
    "text": (BYTES, byte_ids("the cat 你好 😀".encode())),
    "bytes that begin no character": (BYTES, byte_ids(b"\x80")),
    "bytes that end no character": (BYTES, byte_ids(b"\xf0\x9f\x98")),
    "pieces across characters": (BYTES, [BYTES.convert_tokens_to_ids(spelt(ACROSS))]),
    "replacement characters": (WORDS_AND_BYTES, word_ids("�")),
    "special tokens": (BYTES, [BYTES.eos_token_id]),
    "ids that name nothing": (BYTES, [len(BYTES)]),
    "byte tokens": (WORDS_AND_BYTES, word_ids("E4BDA0")),
    "byte tokens and words": (WORDS_AND_BYTES, word_ids("E4BDA0", "▁the")),
    "spaces": (WORDS_AND_BYTES, word_ids("▁")),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_token_costs_the_same_however_long_the_text_is(name):
    tokenizer, cycle = ENDLESS[name]
    output = (cycle * 2000)[:2004]
    backend = Counting(tokenizer)
    told = "".join(pushed(backend, output, [[id] for id in output]))
    assert backend.num_decoded <= 40 * len(output)
    assert told == continued(tokenizer, output, output)
