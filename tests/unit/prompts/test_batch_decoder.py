"""What reward workers decode answers with: the texts of the whole tokenizer, from as little of it as they need."""

import pickle
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from roll_async.prompts.tokenizer import batch_decoder

TEXTS = ["Is it 3.5 , or not ?", "Grüße, 世界 🙂!", "", "do n't  stop"]


def byte_level(**options):
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", **options)


def word_pieces():
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    core.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    core.train_from_iterator(TEXTS, tokenizers.trainers.WordPieceTrainer(special_tokens=["[UNK]", "<eos>"]))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", unk_token="[UNK]", clean_up_tokenization_spaces=True
    )


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level(clean_up_tokenization_spaces=True), word_pieces()])
def test_the_texts_are_those_of_the_whole_tokenizer(tokenizer):
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    decode = pickle.loads(pickle.dumps(batch_decoder(tokenizer, ())))
    assert list(decode(ids)) == tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_a_process_that_gets_it_imports_no_transformers(tmp_path):
    tokenizer = byte_level()
    (tmp_path / "decode").write_bytes(pickle.dumps(batch_decoder(tokenizer, ())))
    program = (
        "import pickle, sys; decode = pickle.load(open(sys.argv[1], 'rb')); "
        "print(decode([[int(word) for word in sys.argv[2:]]])[0], 'transformers' in sys.modules)"
    )
    ids = map(str, tokenizer("3.5 , or")["input_ids"])
    command = [sys.executable, "-c", program, str(tmp_path / "decode"), *ids]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "3.5 , or False", done.stderr
