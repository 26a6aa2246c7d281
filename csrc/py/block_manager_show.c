/* block_manager_show.c - BlockManager: statistics, check, a few lines of text, and the pool drawn for notebooks. */
#include "py/block_manager_py.h"

#include <stdlib.h>

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

// --- the picture

enum { MAX_CELLS = 2000, CELLS_PER_ROW = 80, PITCH = 9, NUM_STATES = 4, BYTES_PER_CELL = 96 };
static const char *const colours[NUM_STATES] = {"#e6e6e6", "#f2c14e", "#4e8fd0", "#7b4fb0"}; /* pk_page_state */
static const char *const labels[NUM_STATES] = {"free", "cached", "used", "shared"};

/* cells[i]: the most frequent state of its pages. */
static void fill_cells(const pk_block_manager *core, int64_t num_blocks, int64_t num_cells, int64_t pages_per_cell,
                       uint8_t *cells)
{
    for (int64_t i = 0; i < num_cells; i++) {
        int64_t seen[NUM_STATES] = {0}, end = (i + 1) * pages_per_cell;
        for (int64_t page = i * pages_per_cell; page < end && page < num_blocks; page++)
            seen[pk_bm_page_state(core, page)]++;
        int best = 0;
        for (int state = 1; state < NUM_STATES; state++)
            if (seen[state] > seen[best]) best = state;
        cells[i] = (uint8_t)best;
    }
}

/* One rectangle a run of equal cells in a row. */
static char *draw_cells(char *at, char *end, const uint8_t *cells, int64_t num_cells)
{
    for (int64_t i = 0, run; i < num_cells; i += run) {
        for (run = 1; i + run < num_cells && (i + run) % CELLS_PER_ROW && cells[i + run] == cells[i];) run++;
        at += PyOS_snprintf(at, (size_t)(end - at), "<rect x='%d' y='%d' width='%d' height='%d' fill='%s'/>",
                            (int)(i % CELLS_PER_ROW) * PITCH, (int)(i / CELLS_PER_ROW) * PITCH, (int)run * PITCH - 1,
                            PITCH - 1, colours[cells[i]]);
    }
    return at;
}

const char py_bm_html_doc[] =
    "_repr_html_($self)\n--\n\nThe text of repr and the pool as an inline SVG, for notebooks.";
PyObject *py_bm_html(PyObject *self, PyObject *unused)
{
    (void)unused;
    char text[512];
    pk_bm_counts counts;
    int64_t waste;
    uint8_t cells[MAX_CELLS];
    int64_t pages_per_cell, num_cells;
    PY_LOCKED(self, {
        const pk_block_manager *core = manager_of(self)->core;
        py_bm_release_gil(manager_of(self));
        pk_bm_get_counts(core, &counts);
        waste = pk_bm_waste_tokens(core);
        pages_per_cell = (counts.num_blocks + MAX_CELLS - 1) / MAX_CELLS;
        num_cells = (counts.num_blocks + pages_per_cell - 1) / pages_per_cell;
        fill_cells(core, counts.num_blocks, num_cells, pages_per_cell, cells);
    });
    describe(&counts, waste, text, sizeof text);

    size_t num_bytes = 4096 + (size_t)num_cells * BYTES_PER_CELL;
    char *html = malloc(num_bytes), *at = html;
    if (!html) return PyErr_NoMemory();
    char *end = html + num_bytes;
    at += PyOS_snprintf(at, (size_t)(end - at), "<div><pre>%s</pre><div>", text);
    for (int i = 0; i < NUM_STATES; i++)
        at += PyOS_snprintf(at, (size_t)(end - at), "<span style='background:%s'>&nbsp;&nbsp;</span> %s &nbsp; ",
                            colours[i], labels[i]);
    int64_t columns = num_cells < CELLS_PER_ROW ? num_cells : CELLS_PER_ROW;
    int64_t rows = (num_cells + CELLS_PER_ROW - 1) / CELLS_PER_ROW;
    at += PyOS_snprintf(at, (size_t)(end - at), "(one cell: %lld page%s)</div><svg width='%d' height='%d'>",
                        (long long)pages_per_cell, pages_per_cell == 1 ? "" : "s", (int)columns * PITCH,
                        (int)rows * PITCH);
    at = draw_cells(at, end, cells, num_cells);
    PyOS_snprintf(at, (size_t)(end - at), "</svg></div>");
    PyObject *result = PyUnicode_FromString(html);
    free(html);
    return result;
}
