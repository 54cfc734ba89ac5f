/* What travels, and what the maps hold. Python's side of it: packets.py and layout.py. */
#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#ifndef ELEMENTS
#error "ELEMENTS: expected the most values that a datagram may have"
#endif

/* Values are dealt with in blocks, the last of which ends with zeros. */
#define BLOCK 8
#define ROOM ((ELEMENTS + BLOCK - 1) / BLOCK * BLOCK)
#define HEADER_WORDS 8 /* behind the tag */
#define MOST_WORKERS 64
#define MAGIC 0x314C4350
#define NOBODY 0xFFFF

enum kind { CONTRIBUTION = 1, RESULT, FREED, RECEIVED, WANTED, PARAMETERS, PROBE };
enum flag { FORWARD = 1, ONWARD = 8, MODES = FORWARD | ONWARD };

struct header {
	__u64 tag;
	__u32 magic;
	__u8 kind;
	__u8 flags;
	__u16 elements;
	__u32 job;
	__u32 slot;
	__u32 round;
	__s16 exponent;
	__u16 worker;
	__u64 bitmap;
};

/* As in a packet. */
struct frame {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	struct header header;
} __attribute__((packed));

/* The same, where a program may build it: aligned. */
struct draft {
	__u16 unused;
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__u32 unused_too;
	struct header header;
};

/* One of two states of a slot: rounds of one parity. */
struct version {
	__s64 round;
	__u64 seen;
	__u16 elements;
	__s16 exponent;
	__u8 flags;
	__u8 over;
	__u16 unused;
};

/* serial: of the job that has used it last; jobs are numbered on and on. */
struct slot {
	struct bpf_spin_lock lock;
	__u32 unused;
	__u64 serial;
	struct version versions[2];
	__u32 values[2][ROOM];
};

/* Where datagrams go. mac: the next hop's, in the first six bytes; none: 0. */
struct end {
	__be32 address;
	__be16 port;
	__u16 unused;
	__u64 mac;
};

struct job {
	__u64 serial;
	__u64 all;
	__u32 first; /* of its lease */
	__u32 slots;
	__u32 elements;
	__u32 agents;
	__u32 key[8];
	struct end workers[MOST_WORKERS];
	struct end next[MOST_WORKERS];
	__u64 multipliers[HEADER_WORDS + ROOM][2];
};

/* cookie: a secret of this kernel's two programs. */
struct config {
	__u64 cookie;
	__be32 address;
	__be16 port;
	__u16 unused;
};

/* The words for these are in layout.py, in this order. */
enum count {
	DATAGRAMS,
	BYTES,
	CONTRIBUTIONS,
	SUMS,
	SENT,
	TRUNCATED,
	UNKNOWN_KIND,
	TOO_LONG,
	FORGED,
	BEYOND_LEASE,
	OUT_OF_PLACE,
	NO_WORKER,
	LATE,
	EARLY,
	DISAGREEING,
	REPEATED,
	OVERLAPPING,
	RECEIVED_AGAIN,
	WANTED_IN_VAIN,
	ENDED,
	FOR_NOBODY,
	NO_WAY,
	MERGED,
	COUNTS,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct config);
} configs SEC(".maps");

/* Not preallocated: whoever still reads a job that is replaced reads what it was. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct job);
} jobs SEC(".maps");

/* As many as the program is started with. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct slot);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

/* A processor's own copy of the values that it deals with: their bounds are known, whatever the
 * packet's are. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32[ROOM + BLOCK]);
} scratch SEC(".maps");

static __always_inline void count(__u32 what, __u64 number)
{
	__u64 *known = bpf_map_lookup_elem(&counts, &what);
	if (known)
		*known += number; /* this processor's own */
}
