"""SuffixIndex against a list of all tokens that is searched from end to end."""

import random

import pytest

from pagedkv.ops import SuffixIndex


class Text:
    def __init__(self, salt=0):
        self.salt, self.last, self.tokens = salt, 0, []  # tokens: (place in the ring, token)
        self.match, self.has_missed = None, False  # a text and a place whose end is that of this one, but for a token perhaps


class Oracle:
    """The last `capacity` tokens of all texts, each with its place."""

    def __init__(self, capacity, min_match, max_match):
        self.capacity, self.min_match, self.max_match = capacity, min_match, max_match
        self.texts, self.newest = [], 0

    def append(self, text, tokens):
        for token in tokens:
            self.newest += 1
            text.tokens.append((self.newest, token))
            for each in self.texts:
                each.tokens = [pair for pair in each.tokens if pair[0] > self.newest - self.capacity]
            self.follow(text, token)

    def follow(self, text, token):
        """The match goes on, also behind one token that is another."""
        following = self.behind(text.match) if len(text.tokens) > 1 else []
        has_missed = bool(following) and following[0][1] != token
        if following and following[0][0] != self.newest and not (has_missed and text.has_missed):
            text.match, text.has_missed = (text.match[0], following[0][0]), has_missed
        else:
            text.match, text.has_missed = None, False

    @staticmethod
    def behind(match):
        """What followed a text's place that is still known."""
        pairs = match[0].tokens if match else []
        return next((pairs[i + 1 :] for i, pair in enumerate(pairs) if pair[0] == match[1]), [])

    def propose(self, text, count):
        own = [token for _, token in text.tokens]
        found = []  # length of the match, next token, place, text, index of the next
        for other in self.texts:
            theirs = [token for _, token in other.tokens]
            for end in range(1, len(theirs)):
                length = 0
                while length < min(end, len(own), self.max_match) and theirs[end - 1 - length] == own[-1 - length]:
                    length += 1
                if length >= self.min_match and other.salt == text.salt:
                    found.append((length, theirs[end], other.tokens[end - 1][0], other, end))
        if not found:
            known = [token for _, token in self.behind(text.match)]
            return self.continued(text, text.match and text.match[0], known, count), self.shared_end(text) if known else 0
        longest = max(each[0] for each in found)
        found = [each for each in found if each[0] == longest]
        votes, newest = {}, {}
        for _, token, place, _, _ in found:
            votes[token] = votes.get(token, 0) + 1
            newest[token] = max(newest.get(token, 0), place)
        token = max(votes, key=lambda each: (votes[each], newest[each]))
        *_, other, end = next(each for each in found if each[2] == newest[token])
        text.match, text.has_missed = (other, newest[token]), False
        return self.continued(text, other, [token for _, token in other.tokens[end:]], count), longest

    @staticmethod
    def continued(text, other, known, count):
        return (known * count if other is text else known)[:count]

    def shared_end(self, text):
        """Of the text and its match."""
        own = [token for _, token in text.tokens]
        theirs = [token for place, token in text.match[0].tokens if place <= text.match[1]]
        length = 0
        while length < min(len(own), len(theirs), self.max_match) and own[-1 - length] == theirs[-1 - length]:
            length += 1
        return length


@pytest.mark.parametrize("capacity, min_match, max_match", [(1, 1, 1), (8, 1, 4), (64, 2, 64), (512, 3, 5), (4096, 3, 64)])
def test_random_texts(seed, capacity, min_match, max_match):
    rng = random.Random(seed + capacity)
    num_found = 0
    for vocab in (2, 5, 40):
        index = SuffixIndex(capacity, min_match=min_match, max_match=max_match, max_candidates=1 << 20)
        oracle = Oracle(capacity, min_match, max_match)
        oracle.texts = [Text(salt=i % 2) for i in range(3)]
        for _ in range(150):
            text = rng.choice(oracle.texts)
            if not text.tokens:
                text.last = 0
            tokens = [rng.randrange(vocab) for _ in range(rng.choice([0, 1, 1, 2, 9]))]
            if text.tokens and rng.random() < 0.3:  # it repeats itself
                tokens = [token for _, token in text.tokens[: rng.randint(1, 20)]]
            text.last = index.append(text.last, tokens, text.salt)
            oracle.append(text, tokens)
            asked, count = rng.choice(oracle.texts), rng.randint(0, 12)
            if not asked.tokens:
                continue
            given, length = index.propose(asked.last, count)
            assert (given, length) == oracle.propose(asked, count)
            num_found += bool(given)
        assert len(index) == min(oracle.newest, capacity)
    assert num_found > 20 or capacity == 1


def test_the_newest_of_few_places_and_where_the_text_went_on():
    """A text is followed to the place that it was proposed from, even if many newer ones share its last tokens."""
    index = SuffixIndex(1 << 12, min_match=2, max_candidates=4)
    index.append(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    own = index.append(0, [3, 4])
    assert index.propose(own, 3) == ([5, 6, 7], 2)
    for _ in range(20):
        index.append(0, [5, 6, 0])  # another text, again and again
    own = index.append(own, [5, 6])
    assert index.propose(own, 5) == ([7, 8, 9], 4)
    assert index.propose(index.append(0, [5, 6]), 1) == ([0], 2)


def test_one_token_that_is_another():
    """The text is followed behind it, at once; not behind two."""
    index = SuffixIndex(1024)
    index.append(0, [*range(1, 20)])
    text = index.append(0, [3, 4, 5])
    assert index.propose(text, 3) == ([6, 7, 8], 3)
    text = index.append(text, [6, 99])
    assert index.propose(text, 3) == ([8, 9, 10], 0)
    text = index.append(text, [8])
    assert index.propose(text, 2) == ([9, 10], 1)
    assert index.propose(index.append(text, [99, 98]), 2) == ([], 0)
    text = index.append(text, [98, 10])
    assert index.propose(text, 2) == ([11, 12], 1)


def test_two_texts_from_one_end_and_salts():
    index = SuffixIndex(1000)
    prompt = index.append(0, [7, 8, 9], 5)
    first = index.append(prompt, [1, 2, 3, 4], 5)
    second = index.append(prompt, [1, 2, 3], 5)
    assert index.propose(second, 9) == ([4], 6) and index.propose(prompt, 2) == ([], 0)
    assert index.propose(index.append(first, [7, 8, 9], 5), 2) == ([1, 2], 3)  # the newest that went on
    assert index.propose(index.append(0, [7, 8, 9], 6), 2) == ([], 0)
    assert index.propose(index.append(0, [7, 8, 9], -(2**63)), 2) == ([], 0)


def test_what_repeats_itself_goes_on():
    index = SuffixIndex(100, min_match=1)
    assert index.propose(index.append(0, [4, 5, 6, 4, 5, 6]), 7) == ([4, 5, 6, 4, 5, 6, 4], 3)
    assert index.propose(index.append(0, [8, 8]), 5)[0] == [8] * 5


def test_nothing_and_what_was_forgotten():
    index = SuffixIndex(4, min_match=1)
    assert len(index) == 0 and index.propose(0, 5) == ([], 0) and index.append(0, []) == 0
    old = index.append(0, [1, 1, 1])
    index.append(0, [2, 3, 4, 5])
    assert len(index) == 4 and index.propose(old, 5) == ([], 0)
    new = index.append(old, [2])  # begins a text
    assert index.propose(new, 5) == ([], 0) and index.propose(12345, 1) == ([], 0)


def test_bad_calls():
    index = SuffixIndex(16)
    for call, error, message in [
        (lambda: SuffixIndex(0), ValueError, "capacity is 0 but must be in 1..2"),
        (lambda: SuffixIndex(2**40), ValueError, "capacity is 1099511627776 but must be in"),
        (lambda: SuffixIndex(9, min_match=0), ValueError, "min_match is 0 but must be"),
        (lambda: SuffixIndex(9, max_candidates=0), ValueError, "max_candidates is 0 but must be"),
        (lambda: SuffixIndex(9, min_match=4, max_match=3), ValueError, "max_match is 3 but must be at least min_match=4"),
        (lambda: SuffixIndex("9"), TypeError, "capacity: must be an int, not 'str'"),
        (lambda: index.append(-1, [1]), ValueError, "last is -1 but must be 0 or what append gave"),
        (lambda: index.append(2**32, [1]), ValueError, "last is 4294967296 but must be"),
        (lambda: index.append(0, [1, -1]), ValueError, "token_ids: element 1 is -1"),
        (lambda: index.append(0, 1), TypeError, "token_ids"),
        (lambda: index.append(0, [1], 2**64), ValueError, "salt: 18446744073709551616 does not fit in 64 bits"),
        (lambda: index.propose(0, -1), ValueError, "count is -1 but must be in 0..1024"),
        (lambda: index.propose(0, 1025), ValueError, "count is 1025 but must be in 0..1024"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert len(index) == 0
