/* block_manager_show.c - BlockManager: statistics, check, a few lines of text, and the pool for notebooks. */
#include "py/block_manager_py.h"

static void get_counts(PyObject *self, pk_bm_counts *counts, int64_t *waste)
{
    const pk_block_manager *core = manager_of(self)->core;
    PY_LOCKED(self, {
        pk_bm_get_counts(core, counts);
        *waste = pk_bm_waste_tokens(core);
    });
}

const char py_bm_stats_doc[] =
    "stats($self)\n--\n\n"
    "A dict of numbers. Pages now: num_blocks = used + cached + free; shared (used by more than one sequence);\n"
    "pending (full, being computed); host_used, host_free. Tokens now: waste_tokens (positions of used pages that\n"
    "hold none). Since the start: hit_tokens of lookup_tokens in allocate, evictions and copies (on write) of pages.\n"
    "Also block_size and num_seqs.";
PyObject *py_bm_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    pk_bm_counts counts;
    int64_t waste;
    get_counts(self, &counts, &waste);
    const struct {
        const char *name;
        int64_t value;
    } rows[] = {
        {"num_blocks", counts.num_blocks}, {"block_size", counts.block_size},
        {"num_seqs", counts.num_seqs},     {"used", counts.used},
        {"cached", counts.cached},         {"free", counts.free},
        {"shared", counts.shared},         {"pending", counts.pending},
        {"host_used", counts.host_used},   {"host_free", counts.host_free},
        {"waste_tokens", waste},           {"hit_tokens", counts.hit_tokens},
        {"evictions", counts.evictions},   {"lookup_tokens", counts.lookup_tokens},
        {"copies", counts.copies},
    };
    PyObject *stats = PyDict_New();
    for (size_t i = 0; stats && i < sizeof rows / sizeof *rows; i++) {
        PyObject *value = PyLong_FromLongLong(rows[i].value);
        if (!value || PyDict_SetItemString(stats, rows[i].name, value) < 0) Py_CLEAR(stats);
        Py_XDECREF(value);
    }
    return stats;
}

const char py_bm_check_doc[] =
    "check($self)\n--\n\n"
    "Verifies every invariant of the manager, in O(pages + tokens): for tests. RuntimeError names a broken one.";
PyObject *py_bm_check(PyObject *self, PyObject *unused)
{
    (void)unused;
    char message[256];
    bool is_sound;
    PY_LOCKED(self, is_sound = pk_bm_check(manager_of(self)->core, message, sizeof message));
    if (is_sound) return Py_NewRef(Py_None);
    PyErr_SetString(PyExc_RuntimeError, message);
    return NULL;
}

static double percent(int64_t part, int64_t whole) { return whole ? 100.0 * (double)part / (double)whole : 0.0; }

/* What repr says: three lines. */
static void describe(const pk_bm_counts *counts, int64_t waste, char *text, size_t text_bytes)
{
    PyOS_snprintf(text, text_bytes,
                  "BlockManager: %lld pages of %lld tokens, %lld sequence%s\n"
                  "  pages: %lld used (%lld shared), %lld cached, %lld free; host: %lld of %lld used\n"
                  "  tokens: %.1f %% of %lld looked up were hits; %lld wasted in used pages; %lld pages evicted",
                  (long long)counts->num_blocks, (long long)counts->block_size, (long long)counts->num_seqs,
                  counts->num_seqs == 1 ? "" : "s", (long long)counts->used, (long long)counts->shared,
                  (long long)counts->cached, (long long)counts->free, (long long)counts->host_used,
                  (long long)counts->num_host_blocks, percent(counts->hit_tokens, counts->lookup_tokens),
                  (long long)counts->lookup_tokens, (long long)waste, (long long)counts->evictions);
}

PyObject *py_bm_repr(PyObject *self)
{
    char text[512];
    pk_bm_counts counts;
    int64_t waste;
    get_counts(self, &counts, &waste);
    describe(&counts, waste, text, sizeof text);
    return PyUnicode_FromString(text);
}

// --- the picture, which Python draws

const char py_bm_html_doc[] =
    "_repr_html_($self)\n--\n\nThe text of repr and the pool as an inline SVG, for notebooks.";
PyObject *py_bm_html(PyObject *self, PyObject *unused)
{
    (void)unused;
    char text[512];
    pk_bm_counts counts;
    int64_t waste;
    get_counts(self, &counts, &waste);
    describe(&counts, waste, text, sizeof text);
    PyObject *pages = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)counts.num_blocks); /* pk_page_state of each */
    PyObject *drawing = pages ? PyImport_ImportModule("pagedkv.pool_picture") : NULL, *html = NULL;
    if (drawing) {
        char *states = PyBytes_AsString(pages);
        memset(states, PK_PAGE_FREE, (size_t)counts.num_blocks);
        PY_LOCKED(self, {
            pk_bm_counts now; /* another thread may have changed the size of the pool */
            (void)pk_pause.begin();
            pk_bm_get_counts(manager_of(self)->core, &now);
            for (int64_t page = 0; page < counts.num_blocks && page < now.num_blocks; page++)
                states[page] = (char)pk_bm_page_state(manager_of(self)->core, page);
        });
        html = PyObject_CallMethod(drawing, "draw", "sO", text, pages);
    }
    Py_XDECREF(drawing);
    Py_XDECREF(pages);
    return html;
}
