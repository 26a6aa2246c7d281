"""What BlockManager does, in plain Python: a trie of pages. Slow, obvious; it shares the rules with the C code, no more.

A node of the trie is a full page's content. It lives while a page holds it; its children become unreachable with it.

Evicted first is the least recently released page; with eviction="reuse" a page that was found again counts as released
three pools later. Found again is what a prompt hit, or what was computed once more after its eviction, if that was among
the last 32 pools of them, and the page before it was found again, too.
"""

import copy


class OutOfPages(Exception):
    pass


class Node:
    def __init__(self, parent=None, tokens=()):
        self.parent, self.tokens, self.pages, self.children = parent, tokens, [], {}
        self.path = (*parent.path, tokens) if parent else (tokens,)


class Page:
    def __init__(self):
        self.refs, self.full, self.node, self.is_computed = 1, 0, None, False
        self.is_found_again, self.released = False, 0


class Seq:
    def __init__(self, salt):
        self.salt, self.tokens, self.pages = salt, [], []
        self.reserved = self.computed = 0
        self.is_swapped, self.is_cacheable = False, True


class Model:
    def __init__(self, num_blocks, block_size, num_host_blocks=0, watermark=0.0, eviction="reuse"):
        self.num_blocks, self.block_size, self.host_free = num_blocks, block_size, num_host_blocks
        self.kept_back = int(num_blocks * watermark)
        self.roots, self.seqs, self.cached, self.free_pages = {}, {}, [], num_blocks
        self.eviction, self.num_released, self.evicted = eviction, 0, {}
        self.evictions = self.hit_tokens = self.lookup_tokens = self.copies = 0

    def attempt(self, method, *args):
        """(the model after the call, its result); raises without a change of self."""
        trial = copy.deepcopy(self)
        return trial, getattr(trial, method)(*args)

    # --- pages

    def available(self):
        return self.free_pages + len(self.cached)

    def used(self):
        return self.num_blocks - self.available()

    def take(self):
        if self.free_pages:
            self.free_pages -= 1
        elif self.cached:
            page = min(self.cached, key=lambda page: page.released + page.is_found_again * (3 * self.num_blocks + 0.5))
            self.cached.remove(page)
            self.evictions += 1
            self.evicted[page.node.path] = self.evictions
            self.leave(page)
        else:
            raise OutOfPages
        return Page()

    def acquire(self, page, is_full):
        if page in self.cached:
            self.cached.remove(page)
        page.refs += 1
        page.full += is_full

    def release(self, page, is_full):
        if is_full:
            self.unfill(page)
        page.refs -= 1
        if page.refs == 0 and page.node:
            page.released, self.num_released = self.num_released, self.num_released + 1
            self.cached.append(page)
        elif page.refs == 0:
            self.free_pages += 1

    def unfill(self, page):
        page.full -= 1
        if not page.full and page.node and not page.is_computed:
            self.leave(page)

    # --- the trie

    def root(self, salt):
        return self.roots.setdefault(salt, Node(tokens=salt))

    def enter(self, page, parent, tokens, is_computed):
        if tokens not in parent.children:
            parent.children[tokens] = Node(parent, tokens)
        page.node, page.is_computed = parent.children[tokens], is_computed
        page.node.pages.insert(0 if is_computed else len(page.node.pages), page)

    def leave(self, page):
        node, page.node, page.is_computed = page.node, None, False
        node.pages.remove(page)
        if not node.pages and node.parent.children.get(node.tokens) is node:
            del node.parent.children[node.tokens]

    def walk(self, tokens, salt):
        """([computed pages], how many more full pages are known)."""
        node, hits, pending = self.root(salt), [], 0
        for i in range(len(tokens) // self.block_size):
            node = node.children.get(tuple(tokens[i * self.block_size : (i + 1) * self.block_size]))
            if node is None:
                break
            if node.pages[0].is_computed and not pending:
                hits.append(node.pages[0])
            else:
                pending += 1
        return hits, pending

    def fill(self, seq, index):
        """Page `index` has got its last token."""
        page = seq.pages[index]
        page.full += 1
        if seq.is_cacheable:
            parent = seq.pages[index - 1].node if index else self.root(seq.salt)
            start, end = index * self.block_size, (index + 1) * self.block_size
            self.enter(page, parent, tuple(seq.tokens[start:end]), end <= seq.computed)
            is_known = self.evictions - self.evicted.get(page.node.path, -(10**9)) < 32 * self.num_blocks
            may_stay = index == 0 or seq.pages[index - 1].is_found_again
            page.is_found_again = self.eviction == "reuse" and is_known and may_stay

    # --- the calls

    def admit(self, was_alone):
        if self.available() < (0 if was_alone else self.kept_back):
            raise OutOfPages

    def allocate(self, prompts, salt):
        """prompts: {seq_id: tokens}."""
        was_alone = self.used() == 0 and len(prompts) == 1
        hits = {seq_id: self.walk(tokens, salt)[0] for seq_id, tokens in prompts.items()}
        for seq_id in prompts:
            self.seqs[seq_id] = Seq(salt)
            for page in hits[seq_id]:
                self.acquire(page, True)
                page.is_found_again = self.eviction == "reuse"
        for seq_id, tokens in prompts.items():
            seq = self.seqs[seq_id]
            seq.tokens, seq.reserved, seq.pages = list(tokens), len(tokens), hits[seq_id]
            seq.computed = len(seq.pages) * self.block_size
            self.hit_tokens += seq.computed
            self.lookup_tokens += len(tokens)
            self.complete(seq)
        self.admit(was_alone)
        return [self.seqs[seq_id].computed for seq_id in prompts]

    def complete(self, seq):
        """New pages for the tokens behind the hits."""
        while len(seq.pages) * self.block_size < len(seq.tokens):
            seq.pages.append(self.take())
            if len(seq.pages) * self.block_size <= len(seq.tokens):
                self.fill(seq, len(seq.pages) - 1)

    def make_room(self, ends):
        """ends: {seq_id: number of positions}; returns the copies as (page, page)."""
        copies = []
        for seq_id, end in ends.items():
            seq = self.seqs[seq_id]
            if end <= len(seq.tokens):
                continue
            tail = len(seq.tokens) // self.block_size
            if tail < len(seq.pages):
                page = seq.pages[tail]
                if page.refs > 1:
                    seq.pages[tail] = self.take()
                    self.release(page, False)
                    copies.append((page, seq.pages[tail]))
                elif page.node:
                    self.leave(page)
            while len(seq.pages) * self.block_size < end:
                seq.pages.append(self.take())
            seq.reserved = max(seq.reserved, end)
        self.copies += len(copies)
        return copies

    def append(self, tokens):
        """tokens: {seq_id: tokens}."""
        copies = self.make_room({s: len(self.seqs[s].tokens) + len(more) for s, more in tokens.items()})
        for seq_id, more in tokens.items():
            seq = self.seqs[seq_id]
            for token in more:
                seq.tokens.append(token)
                if len(seq.tokens) % self.block_size == 0:
                    self.fill(seq, len(seq.tokens) // self.block_size - 1)
        return copies

    def commit(self, seq_id, computed):
        seq = self.seqs[seq_id]
        seq.computed = computed
        for index in range(min(computed, len(seq.tokens)) // self.block_size):
            page = seq.pages[index]
            if page.node and not page.is_computed:
                page.is_computed = True
                page.node.pages.remove(page)
                page.node.pages.insert(0, page)

    def fork(self, parent_id, child_id):
        parent = self.seqs[parent_id]
        child = self.seqs[child_id] = Seq(parent.salt)
        child.tokens, child.reserved, child.is_cacheable = list(parent.tokens), len(parent.tokens), parent.is_cacheable
        child.computed = min(parent.computed, len(parent.tokens))
        child.pages = parent.pages[: -(-len(child.tokens) // self.block_size)]
        for index, page in enumerate(child.pages):
            self.acquire(page, (index + 1) * self.block_size <= len(child.tokens))

    def truncate(self, seq_id, num_tokens):
        seq = self.seqs[seq_id]
        old_full, new_full = len(seq.tokens) // self.block_size, num_tokens // self.block_size
        while (len(seq.pages) - 1) * self.block_size >= num_tokens and seq.pages:
            page = seq.pages.pop()
            self.release(page, len(seq.pages) < old_full)
        if new_full < min(old_full, len(seq.pages)):
            self.unfill(seq.pages[new_full])
        del seq.tokens[num_tokens:]
        seq.reserved, seq.computed = num_tokens, min(seq.computed, num_tokens)

    def free(self, seq_id):
        if self.seqs[seq_id].is_swapped:
            self.host_free += len(self.seqs[seq_id].pages)
        else:
            self.truncate(seq_id, 0)
        del self.seqs[seq_id]

    def swap_out(self, seq_id):
        seq = self.seqs[seq_id]
        self.truncate(seq_id, len(seq.tokens))  # reserved room
        if len(seq.pages) > self.host_free:
            raise OutOfPages
        self.host_free -= len(seq.pages)
        for index in reversed(range(len(seq.pages))):
            self.release(seq.pages[index], (index + 1) * self.block_size <= len(seq.tokens))
        seq.is_swapped = True

    def swap_in(self, seq_id):
        """Returns the indices of the pages whose KV must be copied back."""
        seq, was_alone = self.seqs[seq_id], self.used() == 0
        num_pages = len(seq.pages)
        full = seq.computed // self.block_size * self.block_size
        seq.pages = self.walk(seq.tokens[:full], seq.salt)[0] if seq.is_cacheable else []
        num_hits = len(seq.pages)
        for page in seq.pages:
            self.acquire(page, True)
        self.complete(seq)
        self.host_free += num_pages
        seq.is_swapped = False
        self.admit(was_alone)
        return [i for i in range(num_hits, num_pages) if i * self.block_size < seq.computed]

    def reset(self):
        used = (p for s in self.seqs.values() if not s.is_swapped for p in s.pages)
        pages = {id(p): p for p in [*self.cached, *used]}
        self.free_pages += len(self.cached)
        self.cached = []
        for page in pages.values():
            if page.node:
                self.leave(page)
        for seq in self.seqs.values():
            seq.is_cacheable = False

    def waste(self):
        fill = {}
        for seq in self.seqs.values():
            for index, page in enumerate([] if seq.is_swapped else seq.pages):
                n = min(max(len(seq.tokens) - index * self.block_size, 0), self.block_size)
                fill[id(page)] = max(fill.get(id(page), 0), n)
        return sum(self.block_size - n for n in fill.values())


def serve(manager, seq_id, tokens, **kwargs):
    """A request of a BlockManager that is computed and freed; returns its hit tokens."""
    hits = manager.allocate(seq_id, tokens, **kwargs)
    manager.commit(seq_id, len(tokens))
    manager.free(seq_id)
    return hits
