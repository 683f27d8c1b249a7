// The plainest producer of docs/wire.md, for comparison with the Python client's send():
//     client ENDPOINT NAME SECONDS
// sends packets of 64 raw 32 x 32 x 3 samples as fast as credit allows, keeps each until its ACK, and
// prints acknowledged samples a second after one second of warm-up, and processor seconds a sample.
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <zmq.h>

enum { SAMPLES = 64, SIDE = 32, BYTES = SIDE * SIDE * 3, IMAGES = 4096, UNDER_WAY = 65536 };

unsigned long crc32(unsigned long before, const unsigned char *data, unsigned size);  // zlib's

static double seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void fail(const char *why) {
    fprintf(stderr, "client: %s\n", why);
    exit(1);
}

// msgpack, written

static uint8_t *put(uint8_t *at, const void *data, size_t size) {
    memcpy(at, data, size);
    return at + size;
}

static uint8_t *big(uint8_t *at, uint64_t value, int bytes) {
    while (bytes--) *at++ = (uint8_t)(value >> (8 * bytes));
    return at;
}

static uint8_t *text(uint8_t *at, const char *value) {
    size_t size = strlen(value);  // below 256
    if (size < 32) *at++ = (uint8_t)(0xa0 | size);
    else *at++ = 0xd9, *at++ = (uint8_t)size;
    return put(at, value, size);
}

// msgpack, read: a map with text keys, of whose unsigned values some are wanted

static const uint8_t *skip(const uint8_t *at, const uint8_t *end, uint64_t *value);

static const uint8_t *skip_items(const uint8_t *at, const uint8_t *end, uint64_t count) {
    while (count--) at = skip(at, end, NULL);
    return at;
}

static uint64_t read_big(const uint8_t *at, const uint8_t *end, int bytes) {
    uint64_t value = 0;
    if (end - at < bytes) fail("a message ends early");
    while (bytes--) value = value << 8 | *at++;
    return value;
}

static const uint8_t *skip(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    if (at >= end) fail("a message ends early");
    uint8_t kind = *at++;
    int size;
    if (kind < 0x80) {
        if (value) *value = kind;
        return at;
    }
    if (kind < 0x90) return skip_items(at, end, 2 * (kind & 15));
    if (kind < 0xa0) return skip_items(at, end, kind & 15);
    if (kind < 0xc0) return at + (kind & 31);
    switch (kind) {
        case 0xcc: case 0xcd: case 0xce: case 0xcf:
            size = 1 << (kind - 0xcc);
            if (value) *value = read_big(at, end, size);
            return at + size;
        case 0xc4: case 0xd9: return at + 1 + read_big(at, end, 1);
        case 0xc5: case 0xda: return at + 2 + read_big(at, end, 2);
        case 0xc6: case 0xdb: return at + 4 + read_big(at, end, 4);
        case 0xca: case 0xd2: return at + 4;
        case 0xcb: case 0xd3: return at + 8;
        case 0xd0: return at + 1;
        case 0xd1: return at + 2;
        case 0xdc: return skip_items(at + 2, end, read_big(at, end, 2));
        case 0xde: return skip_items(at + 2, end, 2 * read_big(at, end, 2));
        default: return at;  // nil, false, true
    }
}

static uint64_t field(zmq_msg_t *message, const char *name) {
    const uint8_t *at = zmq_msg_data(message), *end = at + zmq_msg_size(message);
    uint64_t found = 0, value, pairs;
    if (at < end && *at >> 4 == 8) pairs = *at++ & 15;
    else fail("no small map");
    while (pairs--) {
        const uint8_t *key = at + 1;
        size_t size = *at & 31;
        at = skip(at, end, NULL);
        value = 0;
        at = skip(at, end, &value);
        if (size == strlen(name) && !memcmp(key, name, size)) found = value;
    }
    return found;
}

// The dialogue

static void *socket_;
static uint64_t sequence, through, credit, outstanding;
static struct { zmq_msg_t header, payload; uint64_t size; } kept[UNDER_WAY];

static void say(uint8_t kind, const uint8_t *map, size_t size) {
    uint8_t head[4] = {'S', 'S', 1, kind};
    if (zmq_send(socket_, head, 4, ZMQ_SNDMORE) < 0 || zmq_send(socket_, map, size, 0) < 0)
        fail("cannot send");
}

static void forget(uint64_t upto) {
    for (; through < upto; through++) {
        int slot = (through + 1) % UNDER_WAY;
        outstanding -= kept[slot].size;
        zmq_msg_close(&kept[slot].header);
        zmq_msg_close(&kept[slot].payload);
    }
}

static int receive(int timeout_ms) {  // the message's kind; 0: none came
    zmq_pollitem_t ready = {socket_, 0, ZMQ_POLLIN, 0};
    if (timeout_ms && zmq_poll(&ready, 1, timeout_ms) <= 0) return 0;
    zmq_msg_t head, map;
    zmq_msg_init(&head);
    if (zmq_msg_recv(&head, socket_, ZMQ_DONTWAIT) < 0) return 0;
    zmq_msg_init(&map);
    if (zmq_msg_size(&head) != 4 || zmq_msg_recv(&map, socket_, 0) < 0) fail("no message of ours");
    int kind = ((uint8_t *)zmq_msg_data(&head))[3];
    if (kind == 2) sequence = through = field(&map, "resume");
    if (kind == 4) forget(field(&map, "through"));
    if (kind == 2 || kind == 4) credit = field(&map, "credit");
    if (kind > 4) fail("refused: NACK or BYE");
    zmq_msg_close(&head);
    zmq_msg_close(&map);
    return kind;
}

static void greet(const char *name) {
    uint8_t map[512], *at = map;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *at++ = 0x83;
    at = text(text(at, "producer"), name);
    at = text(at, "epoch"), *at++ = 0xcf;
    at = big(at, now.tv_sec * 1000000000ull + now.tv_nsec, 8);
    at = text(at, "first"), *at++ = 1;
    for (int tries = 0; tries < 20; tries++) {
        say(1, map, at - map);
        if (receive(1000) == 2) return;
    }
    fail("no WELCOME");
}

static void pack(const uint8_t *images, uint64_t *number, const char *name) {
    static uint8_t header[SAMPLES * 128 + 512];
    uint8_t *at = header;
    zmq_msg_t payload_message, header_message;
    zmq_msg_init_size(&payload_message, SAMPLES * BYTES);
    uint8_t *payload = zmq_msg_data(&payload_message);
    *at++ = 0x83;
    at = text(text(at, "source"), name);
    at = text(at, "position"), *at++ = 0xc0;
    at = text(at, "samples"), *at++ = 0xdc, at = big(at, SAMPLES, 2);
    for (int row = 0; row < SAMPLES; row++, ++*number) {
        char id[24];
        double time_ = seconds(CLOCK_REALTIME);
        uint64_t bits;
        memcpy(&bits, &time_, 8);
        snprintf(id, sizeof id, "%llu", (unsigned long long)*number);
        *at++ = 0x86;
        at = text(text(at, "id"), id);
        at = text(at, "time"), *at++ = 0xcb, at = big(at, bits, 8);
        at = text(text(at, "codec"), "raw");
        at = text(at, "size"), *at++ = 0xcd, at = big(at, BYTES, 2);
        at = text(at, "shape"), *at++ = 0x93, *at++ = SIDE, *at++ = SIDE, *at++ = 3;
        at = text(at, "label"), *at++ = 1;
        payload = put(payload, images + *number % IMAGES * BYTES, BYTES);
    }
    zmq_msg_init_size(&header_message, at - header);
    memcpy(zmq_msg_data(&header_message), header, at - header);
    int slot = ++sequence % UNDER_WAY;
    kept[slot].header = header_message, kept[slot].payload = payload_message;
    kept[slot].size = at - header + SAMPLES * BYTES;
}

static void send_packet(void) {
    int slot = sequence % UNDER_WAY;
    zmq_msg_t header, payload;
    uint8_t head[4] = {'S', 'S', 1, 3}, second[12];
    while (outstanding + kept[slot].size > credit || sequence - through >= UNDER_WAY - 1)
        if (!receive(30000)) fail("no credit for 30 s");
    big(second, sequence, 8);
    unsigned long sum = crc32(0, second, 8);
    sum = crc32(sum, zmq_msg_data(&kept[slot].header), zmq_msg_size(&kept[slot].header));
    sum = crc32(sum, zmq_msg_data(&kept[slot].payload), zmq_msg_size(&kept[slot].payload));
    big(second + 8, sum, 4);
    zmq_msg_init(&header), zmq_msg_copy(&header, &kept[slot].header);
    zmq_msg_init(&payload), zmq_msg_copy(&payload, &kept[slot].payload);
    if (zmq_send(socket_, head, 4, ZMQ_SNDMORE) < 0 ||
        zmq_send(socket_, second, 12, ZMQ_SNDMORE) < 0 ||
        zmq_msg_send(&header, socket_, ZMQ_SNDMORE) < 0 || zmq_msg_send(&payload, socket_, 0) < 0)
        fail("cannot send");
    outstanding += kept[slot].size;
}

int main(int count, char **arguments) {
    if (count != 4) fail("ENDPOINT NAME SECONDS");
    int ms = 1000, timeout = 3000, one = 1, linger = 1000;
    void *context = zmq_ctx_new();
    socket_ = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(socket_, ZMQ_HEARTBEAT_IVL, &ms, sizeof ms);
    zmq_setsockopt(socket_, ZMQ_HEARTBEAT_TIMEOUT, &timeout, sizeof timeout);
    zmq_setsockopt(socket_, ZMQ_HEARTBEAT_TTL, &timeout, sizeof timeout);
    zmq_setsockopt(socket_, ZMQ_IMMEDIATE, &one, sizeof one);
    zmq_setsockopt(socket_, ZMQ_LINGER, &linger, sizeof linger);
    if (zmq_connect(socket_, arguments[1])) fail("cannot connect");
    uint8_t *images = malloc((size_t)IMAGES * BYTES);
    for (size_t n = 0; n < (size_t)IMAGES * BYTES; n++) images[n] = (uint8_t)rand();
    greet(arguments[2]);
    double duration = atof(arguments[3]), begun = seconds(CLOCK_MONOTONIC), mark = 0, now, cpu = 0;
    uint64_t number = 0, base = 0;
    do {
        pack(images, &number, arguments[2]);
        send_packet();
        while (receive(0)) {}
        now = seconds(CLOCK_MONOTONIC);
        if (!mark && now - begun >= 1)
            mark = now, base = through, cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    } while (!mark || now - mark < duration);
    double rate = (through - base) * (double)SAMPLES;
    printf("%.1f %.4g\n", rate / (now - mark), (seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / rate);
    while (through < sequence)
        if (!receive(30000)) fail("no ACK for 30 s");
    say(6, (const uint8_t *)"\x80", 1);
    zmq_close(socket_);
    zmq_ctx_term(context);
    return 0;
}
