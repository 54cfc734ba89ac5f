/* Sums in the kernel's receive path: two programs at one interface.
 *
 * receive (XDP), for every packet that comes, before the kernel has made anything of it:
 *     datagrams of a job that is here are checked, added up and gone; one that is to be answered
 *     is marked with a secret (the tag becomes the config's cookie, the kind becomes a verdict)
 *     and goes on. All else goes on as it came: to the control connections, or to the
 *     aggregator's socket, which has the jobs of other rules.
 * answer (TC, on the way in), for what `receive` has marked: the datagram becomes the answer,
 *     which leaves by the interface it came by, one copy for each that is to have it.
 *
 * XDP alone can send one packet for one that came; only here can it be copied, and sent to next
 * hops that are not known yet. */
#include "layout.h"
#include "seal.h"
#include "slots.h"

#define HEADERS (sizeof(struct frame) - sizeof(struct header))
#define IP_HEADER 0x45 /* version 4, no options */
#define FRAGMENT 0x3FFF

/* What `answer` ends with, where it redirects nothing: the kernel's TCX_NEXT and TCX_DROP. */
enum { PASSED_ON = -1, LOST = 2 };

static __always_inline int for_us(const struct ethhdr *eth, const struct iphdr *ip,
				  const struct udphdr *udp,
				  const struct config *config)
{
	return eth->h_proto == bpf_htons(ETH_P_IP) && *(const __u8 *)ip == IP_HEADER &&
	       ip->protocol == IPPROTO_UDP && !(ip->frag_off & bpf_htons(FRAGMENT)) &&
	       ip->daddr == config->address && udp->dest == config->port;
}

static __always_inline __u64 packed(const __u8 mac[ETH_ALEN])
{
	return mac[0] | (__u64)mac[1] << 8 | (__u64)mac[2] << 16 | (__u64)mac[3] << 24 |
	       (__u64)mac[4] << 32 | (__u64)mac[5] << 40;
}

/* Answers to a worker take the way back that its contributions have come. */
static __always_inline void learn(struct job *job, __u32 worker, const struct frame *frame)
{
	__u64 mac = packed(frame->eth.h_source);

	if (worker >= MOST_WORKERS)
		return;
	struct end *end = &job->workers[worker];
	if (end->mac != mac && end->address == frame->ip.saddr)
		end->mac = mac;
}

static __always_inline struct outcome deal_with(struct job *job,
						const struct header *header,
						const __u32 *values)
{
	struct outcome outcome;
	__u32 place = job->first + header->slot;
	__u8 kind = header->kind;

	if (header->slot >= job->slots)
		return dropped(BEYOND_LEASE);
	if (kind != CONTRIBUTION && kind != RECEIVED && kind != WANTED)
		return dropped(OUT_OF_PLACE);
	if (kind == CONTRIBUTION && !has_own_bits(header, job->all))
		return dropped(NO_WORKER);
	struct slot *slot = bpf_map_lookup_elem(&slots, &place);
	if (!slot)
		return dropped(BEYOND_LEASE);
	bpf_spin_lock(&slot->lock);
	if (!own(slot, job))
		outcome = dropped(ENDED);
	else if (kind == CONTRIBUTION)
		outcome = contribute(slot, job, header, values);
	else
		outcome = told(slot, job, header);
	bpf_spin_unlock(&slot->lock);
	return outcome;
}

/* A number that the verifier knows the bounds of only from what is compared with it. */
static __always_inline __u32 bytes_of(__u32 elements)
{
	__u32 bytes = 4 * elements;

	asm volatile("" : "+r"(bytes));
	return bytes;
}

/* Whether the values are all there; a copy of them. */
static __always_inline int copied(struct xdp_md *context, __u32 *values, __u32 elements)
{
	__u32 bytes = bytes_of(elements);

	if (bytes && bytes <= 4 * ELEMENTS &&
	    bpf_xdp_load_bytes(context, sizeof(struct frame), values, bytes))
		return 0;
#pragma unroll
	for (int i = 0; i < BLOCK; i++)
		values[elements + i] = 0;
	return 1;
}

/* What is wrong with a datagram, by what it says of itself; else COUNTS. */
static __always_inline enum count malformed(const struct header *header, __u16 length,
					    const struct job *job)
{
	if (header->kind < CONTRIBUTION || header->kind > PROBE)
		return UNKNOWN_KIND;
	if (length != sizeof(struct udphdr) + sizeof(*header) + 4 * header->elements)
		return TRUNCATED;
	if (header->elements > job->elements)
		return TOO_LONG;
	return COUNTS;
}

SEC("xdp")
int receive(struct xdp_md *context)
{
	struct frame *frame = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	__u32 zero = 0;

	struct config *config = bpf_map_lookup_elem(&configs, &zero);
	if (!config || (void *)(frame + 1) > end ||
	    !for_us(&frame->eth, &frame->ip, &frame->udp, config) ||
	    frame->header.magic != MAGIC)
		return XDP_PASS;
	struct header header = frame->header;
	struct job *job = bpf_map_lookup_elem(&jobs, &header.job);
	__u32 *values = bpf_map_lookup_elem(&scratch, &zero);
	if (!job || !values)
		return XDP_PASS;

	__u16 length = bpf_ntohs(frame->udp.len);
	count(DATAGRAMS, 1);
	count(BYTES, length > sizeof(struct udphdr) ? length - sizeof(struct udphdr) : 0);
	enum count why = malformed(&header, length, job);
	__u32 elements = header.elements;
	if (why == COUNTS &&
	    (elements > ELEMENTS || !copied(context, values, elements)))
		why = TRUNCATED;
	if (why == COUNTS) {
		struct sums sums = {};
		mix_header(&sums, &header, job);
		mix_values(&sums, values, elements, job);
		if (tag_of(job, &sums) != header.tag)
			why = FORGED;
	}
	if (why != COUNTS) {
		count(why, 1);
		return XDP_DROP;
	}

	if (header.kind == PROBE) {
		/* It goes back as it came: its tag waits where it has zeros. */
		frame->header.bitmap = header.tag;
		frame->header.tag = config->cookie;
		frame->header.kind = BACK;
		return header.bitmap ? XDP_DROP : XDP_PASS;
	}
	count(CONTRIBUTIONS, 1);
	struct outcome outcome = deal_with(job, &header, values);
	if (outcome.taken)
		learn(job, header.worker, frame);
	if (!outcome.verdict) {
		if (!outcome.taken)
			count(outcome.why, 1);
		return XDP_DROP;
	}
	frame->header.tag = config->cookie;
	frame->header.kind = outcome.verdict;
	return XDP_PASS;
}

/* ---- answers ---- */

struct sending {
	struct __sk_buff *skb;
	const struct job *job;
	struct draft *draft;
	__u32 partial; /* the sender has left the checksum to the last device */
	__u32 but;     /* this worker comes last, by another way */
};

static __always_inline __u32 folded(__u32 sum)
{
	sum = (sum & 0xFFFF) + (sum >> 16);
	return (sum & 0xFFFF) + (sum >> 16);
}

static __always_inline void lead_to(struct draft *draft, const struct end *to, int partial)
{
	const __u16 *words = (const __u16 *)&draft->ip;
	__u32 sum = 0;

	for (int i = 0; i < ETH_ALEN; i++)
		draft->eth.h_dest[i] = to->mac >> 8 * i;
	draft->ip.daddr = to->address;
	draft->udp.dest = to->port;
	draft->ip.check = 0;
#pragma unroll
	for (int i = 0; i < 10; i++)
		sum += words[i];
	draft->ip.check = ~folded(sum);
	/* None: tags are better. Where a device is to complete it, what that begins with. */
	sum = (words[6] + words[7]) + (words[8] + words[9]);
	sum += bpf_htons(IPPROTO_UDP) + draft->udp.len;
	draft->udp.check = partial ? folded(sum) : 0;
}

static long send_copy(__u32 worker, struct sending *sending)
{
	if (worker >= MOST_WORKERS)
		return 1;
	const struct end *to = &sending->job->workers[worker];
	if (!to->port || worker == sending->but)
		return 0;
	if (!to->mac) {
		count(NO_WAY, 1); /* it will ask by itself */
		return 0;
	}
	lead_to(sending->draft, to, sending->partial);
	if (bpf_skb_store_bytes(sending->skb, 0, &sending->draft->eth, HEADERS, 0) ||
	    bpf_clone_redirect(sending->skb, sending->skb->ifindex, 0))
		return 0;
	count(SENT, 1);
	return 0;
}

/* The datagram itself leaves. */
static __always_inline int send(struct sending *sending, const struct end *to)
{
	struct __sk_buff *skb = sending->skb;

	if (!to->port) {
		count(FOR_NOBODY, 1);
		return LOST;
	}
	lead_to(sending->draft, to, sending->partial);
	if (bpf_skb_store_bytes(skb, 0, &sending->draft->eth, HEADERS, 0))
		return LOST;
	count(SENT, 1);
	if (to->mac)
		return bpf_redirect(skb->ifindex, 0);
	return bpf_redirect_neigh(skb->ifindex, NULL, 0, 0);
}

/* To all but *but*, by copies. */
static __always_inline void send_copies(struct sending *sending, __u32 but)
{
	sending->but = but;
	bpf_loop(MOST_WORKERS, send_copy, sending, 0);
}

/* To *worker*, or to all: as the last thing that happens. */
static __always_inline int send_to(struct sending *sending, __u32 worker)
{
	if (worker == NOBODY) {
		send_copies(sending, MOST_WORKERS);
		return LOST;
	}
	if (worker >= MOST_WORKERS) {
		count(FOR_NOBODY, 1);
		return LOST;
	}
	return send(sending, &sending->job->workers[worker]);
}

/* Let the datagram become the sum, or the word that the slot is free. Whether it has. */
static __always_inline int become(struct sending *sending, const struct version *version,
				  const __u32 *values, enum kind kind)
{
	struct __sk_buff *skb = sending->skb;
	struct draft *draft = sending->draft;
	struct header *header = &draft->header;
	__u32 elements = kind == RESULT ? version->elements : 0;
	struct sums sums = {};

	if (elements > ELEMENTS)
		return 0;
	header->magic = MAGIC;
	header->kind = kind;
	header->flags = version->flags;
	header->elements = elements;
	header->exponent = kind == RESULT ? version->exponent : 0;
	header->worker = NOBODY;
	header->bitmap = version->seen;
	mix_header(&sums, header, sending->job);
	mix_values(&sums, values, elements, sending->job);
	header->tag = tag_of(sending->job, &sums);

	__u32 length = sizeof(struct frame) + 4 * elements;
	draft->ip.tot_len = bpf_htons(length - sizeof(struct ethhdr));
	draft->udp.len = bpf_htons(length - sizeof(struct ethhdr) - sizeof(struct iphdr));
	if (skb->len != length && bpf_skb_change_tail(skb, length, 0))
		return 0;
	if (bpf_skb_store_bytes(skb, HEADERS, header, sizeof(*header), 0))
		return 0;
	__u32 bytes = bytes_of(elements);
	return !bytes || bytes > 4 * ELEMENTS ||
	       !bpf_skb_store_bytes(skb, sizeof(struct frame), values, bytes, 0);
}

/* Whether a device is to complete the checksum: only then is a change of it not written. */
static __always_inline int is_partial(struct __sk_buff *skb)
{
	__u32 offset = offsetof(struct frame, udp.check);
	__u16 before = 0x1234, after = 0;

	bpf_skb_store_bytes(skb, offset, &before, sizeof(before), 0);
	bpf_l4_csum_replace(skb, offset, 0, 1, sizeof(before));
	bpf_skb_load_bytes(skb, offset, &after, sizeof(after));
	return before == after;
}

static __always_inline int back(struct sending *sending)
{
	struct header *header = &sending->draft->header;
	__u32 worker = header->worker;

	header->tag = header->bitmap;
	header->bitmap = 0;
	header->kind = PROBE;
	if (bpf_skb_store_bytes(sending->skb, HEADERS, header, sizeof(*header), 0))
		return LOST;
	return send_to(sending, worker);
}

static __always_inline int send_sums(struct sending *sending, __u32 verdict, __u32 worker)
{
	const struct job *job = sending->job;
	__u32 agent = job->agents ? sending->draft->header.slot % job->agents : 0;

	if (verdict & (SUM_TO_ALL | SUM_TO_WORKER | SUM_TO_NEXT))
		count(SUMS, 1);
	if (verdict & SUM_TO_NEXT) {
		if (verdict & SUM_TO_ALL)
			send_copies(sending, MOST_WORKERS);
		else if (verdict & SUM_TO_WORKER)
			send_copy(worker, sending);
		if (agent >= MOST_WORKERS)
			return LOST;
		return send(sending, &job->next[agent]);
	}
	if (verdict & SUM_TO_ALL) {
		send_copies(sending, worker);
		return worker < MOST_WORKERS ? send_to(sending, worker) : LOST;
	}
	return send_to(sending, worker);
}

SEC("tc")
int answer(struct __sk_buff *skb)
{
	struct draft draft = {};
	__u32 zero = 0;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return PASSED_ON;
	struct config *config = bpf_map_lookup_elem(&configs, &zero);
	if (!config || bpf_skb_load_bytes(skb, 0, &draft.eth, HEADERS) ||
	    bpf_skb_load_bytes(skb, HEADERS, &draft.header, sizeof(draft.header)) ||
	    !for_us(&draft.eth, &draft.ip, &draft.udp, config) ||
	    draft.header.magic != MAGIC || draft.header.tag != config->cookie)
		return PASSED_ON;
	if (skb->gso_segs > 1) {
		count(MERGED, 1);
		return LOST;
	}
	struct job *job = bpf_map_lookup_elem(&jobs, &draft.header.job);
	if (!job || draft.header.slot >= job->slots)
		return LOST;

	struct sending sending = {
		.skb = skb,
		.job = job,
		.draft = &draft,
		.partial = is_partial(skb),
		.but = MOST_WORKERS,
	};
	__u8 ours[ETH_ALEN];
	__builtin_memcpy(ours, draft.eth.h_dest, ETH_ALEN);
	__builtin_memcpy(draft.eth.h_source, ours, ETH_ALEN);
	draft.ip.saddr = config->address;
	draft.ip.ttl = 64;
	draft.ip.tos = 0;
	draft.udp.source = config->port;
	__u32 verdict = draft.header.kind, worker = draft.header.worker;
	if (verdict == BACK)
		return back(&sending);

	__u32 place = job->first + draft.header.slot;
	struct slot *slot = bpf_map_lookup_elem(&slots, &place);
	if (!slot)
		return LOST;
	/* No lock: nobody begins the round after next before all have this one's sum, and who has
	 * it does not take it again. */
	__u32 odd = draft.header.round & 1;
	struct version *version = odd ? &slot->versions[1] : &slot->versions[0];
	if (version->round != draft.header.round || slot->serial != job->serial)
		return LOST;
	__u32 *values = odd ? slot->values[1] : slot->values[0];
	if (verdict & (SUM_TO_ALL | SUM_TO_NEXT | SUM_TO_WORKER)) {
		if (!become(&sending, version, values, RESULT))
			return LOST;
		if (!(verdict & (FREED_TO_ALL | FREED_TO_WORKER)))
			return send_sums(&sending, verdict, worker);
		count(SUMS, 1);
		if (worker == NOBODY)
			send_copies(&sending, MOST_WORKERS);
		else
			send_copy(worker, &sending);
	}
	if (!become(&sending, version, values, FREED))
		return LOST;
	count(SUMS, 1);
	return send_to(&sending, verdict & FREED_TO_ALL ? NOBODY : worker);
}

char terms[] SEC("license") = "Apache-2.0";
